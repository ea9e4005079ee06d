"""Jobs for Slurm: a job and a site make an sbatch file; it is submitted, watched and collected.

The command line, notebooks and `upkeep` call it, on a login node. `job` says what to run, `site`
where, and `sbatch` makes the file; `script_jobs` checks a script first. `run` submits, `monitor`
watches and collects, `local` runs a job without Slurm; `queue` has Slurm's commands.
"""

from ddp_helpers.jobs.job import Job, JobError
from ddp_helpers.jobs.monitor import collect, rank_lines, watch
from ddp_helpers.jobs.queue import available, cancel, start_now, states_of_job
from ddp_helpers.jobs.run import resubmit, submit, write_job
from ddp_helpers.jobs.sbatch import render
from ddp_helpers.jobs.script_jobs import as_arguments, keeps_no_record, prepare, ready, run_folder
from ddp_helpers.jobs.site import Site

__all__ = [
    "Job",
    "JobError",
    "Site",
    "available",
    "cancel",
    "collect",
    "keeps_no_record",
    "resubmit",
]
__all__ += ["prepare", "rank_lines", "ready", "render", "run_folder", "start_now"]
__all__ += ["as_arguments", "states_of_job", "submit", "watch", "write_job"]
