"""Jobs for Slurm: a job and a site make an sbatch file; it is submitted, watched and collected.

It runs on a login node. `job` has what to run, `site` has where, and `sbatch` makes the file;
`script_jobs` checks a script first. `run` submits, `monitor` watches and collects, `local` runs a
job without Slurm; `queue` has Slurm's commands. Notebooks use these as `jobs.submit` and so on:
"""

from ddp_helpers.jobs.job import Job, JobError
from ddp_helpers.jobs.monitor import collect, rank_lines, watch
from ddp_helpers.jobs.queue import available, cancel, start_now, states_of_job
from ddp_helpers.jobs.run import resubmit, submit, write_job
from ddp_helpers.jobs.sbatch import render
from ddp_helpers.jobs.script_jobs import as_arguments, prepare, run_folder
from ddp_helpers.jobs.site import Site
