"""Jobs for Slurm: a job and a site make an sbatch file; it is submitted, watched and collected.

The command line, notebooks and `upkeep` call it, on a login node. `job` says what to run, `site`
where, and `sbatch` makes the file; `script_jobs` checks a script first. `run` submits, `monitor`
watches and collects, `local` runs a job without Slurm; `queue` has Slurm's commands.
"""

from ddp_helpers.jobs.job import Job, JobError
from ddp_helpers.jobs.monitor import collect, said, watch
from ddp_helpers.jobs.queue import available, cancel, look, start_now
from ddp_helpers.jobs.run import again, submit, write
from ddp_helpers.jobs.sbatch import render
from ddp_helpers.jobs.script_jobs import keeps_no_record, prepare, ready, run_folder, words_of
from ddp_helpers.jobs.site import Site

__all__ = ["Job", "JobError", "Site", "again", "available", "cancel", "collect", "keeps_no_record"]
__all__ += ["look", "prepare", "ready", "render", "run_folder", "said", "start_now", "submit"]
__all__ += ["watch", "words_of", "write"]
