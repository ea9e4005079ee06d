"""The same job where there is no Slurm: its ranks run under torchrun on this machine."""

import os
from contextlib import chdir
from datetime import datetime
from pathlib import Path

from ddp_helpers.notebook.slurm.files import folder_of, job_of, keep, log_path
from ddp_helpers.notebook.slurm.job import ARRAY, RUN_DIR, JobError, seconds
from ddp_helpers.notebook.slurm.queue import State

MOST = 8  # ranks for each CPU of this machine: more would do nothing but fill its memory


def run_here(folder: Path, said: dict) -> None:
    """Run the job's ranks on this machine, and keep how it ended as Slurm would. Raises JobError for too many."""
    from ddp_helpers.notebook import launch  # here, since it imports IPython, which no cluster's job needs

    job, states = job_of(said), []
    if job.ranks > MOST * (os.cpu_count() or 1):
        raise JobError(
            f"no Slurm answers here, and {job.ranks} ranks are too many for one machine: go to the login node"
        )
    print("No Slurm answers here: the same script runs under torchrun on this machine, now.")
    for task, value in enumerate(job.array or [""]):
        number = str(task) if job.array else ""
        target, begin, state = folder_of(folder, number), datetime.now(), "COMPLETED"
        target.mkdir(exist_ok=True)
        words = [word.replace(RUN_DIR, str(target)).replace(ARRAY, value) for word in job.program]
        if (folder / words[0]).is_file():
            words[0] = str(folder / words[0])
        by = {"launcher": "python"} if words[0] == "-m" else {"ranks": [job.tasks_per_node] * job.nodes}
        try:
            with chdir(folder):  # as the job file does
                ran = launch.run(*words, timeout=seconds(job.time), **by)
            log_path(target, None).write_text("".join(f"{rank or 0}: {text}\n" for rank, text in ran.lines))
        except launch.LaunchError as error:
            print(error)
            state = "FAILED"
        times = {"submitted": begin, "started": begin, "ended": datetime.now()}
        times = {name: at.isoformat(timespec="seconds") for name, at in times.items()}
        ended = State("", state, **times, task=number, source="torchrun")
        keep(target, said | ended.record() | {"job_id": None})
        states.append(state)
    if job.array:
        keep(folder, said | {"state": max(states)})  # FAILED, if one task did
