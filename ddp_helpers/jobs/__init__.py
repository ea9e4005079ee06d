"""Jobs for Slurm: a job and a site make an sbatch file; it is submitted, watched, and collected.

job (what is asked) and site (where) make the file; own checks a script and writes both; queue has Slurm's commands;
run sees a run folder through.
"""

from ddp_helpers.jobs.job import Job, JobError
from ddp_helpers.jobs.own import keeps_no_record, prepare, ready, run_folder, words_of
from ddp_helpers.jobs.queue import available, cancel, look, start_now
from ddp_helpers.jobs.run import again, collect, said, submit, watch, write
from ddp_helpers.jobs.site import Site, render

__all__ = ["Job", "JobError", "Site", "available", "cancel", "collect", "look", "prepare", "ready", "render"]
__all__ += ["run_folder", "said", "start_now", "submit", "watch", "write"]
__all__ += ["again", "keeps_no_record", "words_of"]
