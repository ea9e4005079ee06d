"""Run a job on this machine under torchrun, if no Slurm answers.

`run.submit` calls it for a job of the site `local`, in the driver process.
"""

import os
from contextlib import chdir
from datetime import datetime
from pathlib import Path

from ddp_helpers.jobs.files import JobRecord, folder_of, job_from_record, keep, log_path
from ddp_helpers.jobs.job import Job, JobError, seconds
from ddp_helpers.jobs.queue import State

# More ranks would only fill the memory of this machine.
_RANKS_FOR_EACH_CPU = 8


def run_here(folder: Path, record: JobRecord) -> None:
    """Run the job's ranks on this machine, and note in job.json how it ended, as Slurm would.

    The tasks of an array run one after the other. Raises JobError for too many ranks.
    """
    job = job_from_record(record)
    if job.ranks > _RANKS_FOR_EACH_CPU * (os.cpu_count() or 1):
        ranks = f"{job.ranks} ranks are too many for one machine"
        raise JobError(f"no Slurm answers here, and {ranks}: go to the login node")
    print("No Slurm answers here: the same script runs under torchrun on this machine, now.")
    if not job.array:
        _run_task(job, folder, record, task="", value="")
        return
    states = []
    for task, value in enumerate(job.array):
        states.append(_run_task(job, folder, record, str(task), value))
    keep(folder, record | {"state": max(states)})  # FAILED, if one task did


def _run_task(job: Job, folder: Path, record: JobRecord, task: str, value: str) -> str:
    """Run one task of an array, or a job without one, and return its state.

    task: its number, or ''; value: what replaces {array}.
    """
    target = folder_of(folder, task)
    target.mkdir(exist_ok=True)
    begin = datetime.now()
    state = "COMPLETED" if _ran_well(job, folder, target, value) else "FAILED"
    ended = State(
        job_id="",
        state=state,
        submitted=begin.isoformat(timespec="seconds"),
        started=begin.isoformat(timespec="seconds"),
        ended=datetime.now().isoformat(timespec="seconds"),
        task=task,
        source="torchrun",
    )
    keep(target, record | ended.record() | {"job_id": None})
    return state


def _ran_well(job: Job, folder: Path, target: Path, value: str) -> bool:
    """Run the program to its end, and write its log; False, with the reason printed, if it fails.

    folder: the script's folder; target: the run folder of this task.
    """
    from ddp_helpers.launch import launch  # here: it imports IPython, which jobs do not need

    program = job.filled_in(target, value)
    if (folder / program[0]).is_file():
        program[0] = str(folder / program[0])
    folders = [job.imports_from, os.environ.get("PYTHONPATH")]  # as in the job file
    env = {"PYTHONPATH": os.pathsep.join(filter(None, folders))} if job.imports_from else None
    try:
        with chdir(folder):  # as the job file does
            if program[0] == "-m":
                ran = launch.run(*program, timeout=seconds(job.time), launcher="python")
            else:
                ranks = [job.ranks_per_node] * job.nodes
                ran = launch.run(*program, timeout=seconds(job.time), ranks=ranks, env=env)
    except launch.LaunchError as error:
        print(error)
        return False
    log = "".join(f"{rank or 0}: {text}\n" for rank, text in ran.lines)
    log_path(target, None).write_text(log)
    return True
