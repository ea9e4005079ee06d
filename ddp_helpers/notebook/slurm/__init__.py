"""Jobs for Slurm: a job and a site make an sbatch file; it is submitted, watched, and collected.

job (what is asked) and site (where) → batch (the file) → queue (Slurm's commands) → run (a run folder's way through)
and watch; here is the same without Slurm.
"""

from ddp_helpers.notebook.slurm.job import Job, JobError
from ddp_helpers.notebook.slurm.own import prepare, run_folder
from ddp_helpers.notebook.slurm.queue import available, cancel, look, start_now
from ddp_helpers.notebook.slurm.run import collect, said, submit, write
from ddp_helpers.notebook.slurm.site import Site, render
from ddp_helpers.notebook.slurm.watch import watch

__all__ = [
    "Job",
    "JobError",
    "Site",
    "available",
    "cancel",
    "collect",
    "look",
    "prepare",
    "render",
    "run_folder",
    "said",
    "start_now",
    "submit",
    "watch",
    "write",
]
