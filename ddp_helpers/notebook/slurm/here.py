"""The same job where there is no Slurm: its ranks run under torchrun on this machine."""

from contextlib import chdir
from datetime import datetime
from pathlib import Path

from ddp_helpers.notebook import launch
from ddp_helpers.notebook.slurm.files import folder_of, keep, log_path
from ddp_helpers.notebook.slurm.job import ARRAY, RUN_DIR, Job
from ddp_helpers.notebook.slurm.queue import State

UNITS = (1, 60, 3600, 86400)


def run_here(folder: Path, said: dict) -> None:
    """Run the job's ranks on this machine, and keep how it ended as Slurm would say it."""
    job = Job(**{key: tuple(value) if isinstance(value, list) else value for key, value in said["job"].items()})
    states = []
    for task, value in enumerate(job.array or [""]):
        number = str(task) if job.array else ""
        target, begin, state = folder_of(folder, number), datetime.now(), "COMPLETED"
        target.mkdir(exist_ok=True)
        words = [{RUN_DIR: str(target), ARRAY: value}.get(word, word) for word in job.program]
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


def seconds(limit: str) -> float:
    """A time limit of Slurm's in seconds."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Without days a single number is minutes, two are minutes:seconds; behind days they are hours, and hours:minutes.
    parts += [0] * ((3 if days or len(parts) == 3 else 2) - len(parts))
    return sum(part * unit for part, unit in zip(reversed(parts), UNITS, strict=False)) + int(days or 0) * UNITS[3]
