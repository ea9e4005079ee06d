"""A run folder's way through Slurm: its file written and submitted, and what came of it collected."""

import os
from contextlib import chdir
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from ddp_helpers.notebook import runs
from ddp_helpers.notebook.screen import tidy
from ddp_helpers.notebook.slurm.files import BATCH, PREPARED, discard, folder_of, job_of, keep, known, log_path, missing
from ddp_helpers.notebook.slurm.job import ARRAY, RUN_DIR, Job, JobError, seconds
from ddp_helpers.notebook.slurm.queue import State, available, look, send
from ddp_helpers.notebook.slurm.site import Site, render
from ddp_helpers.notebook.slurm.watch import RANK, line


def write(job: Job, site: Site, folder: Path, script: str | None = None) -> Path:
    """Write the sbatch file into a run folder, beside the script that it starts, and give its path.

    script: the text of that script, to be written too; then all is taken back if Slurm refuses the job. Raises
    JobError, with nothing written, if the folder holds another run, or another script of that name.
    """
    folder = Path(folder).absolute()
    text, made, target = render(job, site, folder), missing(folder, job.program[0]), folder / job.program[0]
    try:
        if taken := [name for name in ("job.json", "metrics.jsonl", BATCH) if (folder / name).exists()]:
            raise JobError(f"{tidy(str(folder))} holds another run already (its {taken[0]}): choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        keep(folder, {"job": asdict(job), "site": site.name, "job_id": None, "state": "WRITTEN"})
        (folder / BATCH).write_text(text)
        if script is not None:
            if not (target.is_file() and target.read_text(errors="replace") == script):  # it may lie there already
                with target.open("x") as file:  # another one is not overwritten
                    file.write(script)
            PREPARED[folder] = made
    except OSError as error:
        discard(made)
        raise JobError(f"{tidy(str(folder))} cannot take the job ({error.strerror}): choose another folder") from None
    return folder / BATCH


def submit(folder: Path) -> str:
    """Submit the job that was written here, and give its id; without Slurm, run it under torchrun, and say so.

    Raises JobError where Slurm refuses it; what prepare() wrote is gone then, and what was written by hand stays.
    """
    folder, said = Path(folder).absolute(), known(folder)
    if said["job_id"] or said["state"] != "WRITTEN":
        how = f"as job {said['job_id']}" if said["job_id"] else "and ran here, without Slurm"
        raise JobError(f"{tidy(str(folder))} was submitted already, {how}: write a new job into a new folder")
    try:
        if not available():
            run_here(folder, said)
            return ""
        number = send(folder / BATCH)
    except JobError:
        discard(PREPARED.pop(folder, ()))
        raise
    keep(folder, said | {"job_id": number, "state": "PENDING", "folder": str(folder)})
    print(f"submitted: job {number}")
    return number


def collect(folder: Path) -> list[runs.Run]:
    """The record of the job's run, or of each task of its array, with Slurm's word on how it ended.

    Raises JobError if the job has not ended.
    """
    folder, said = Path(folder).absolute(), known(folder)
    if said["state"] == "WRITTEN":
        raise JobError(f"{tidy(str(folder))} holds a job that was not submitted: submit it first")
    if not said["job_id"]:
        if said.get("task"):
            return [runs.read(folder)]
        tasks = [str(task) for task in range(len(said["job"]["array"]))] or [""]
        return [runs.read(folder_of(folder, task)) for task in tasks]
    if (first := said.get("folder", str(folder))) != str(folder):  # here another job may have its number
        print(f"copied from {tidy(first)}: this Slurm is not asked about job {said['job_id']}")
        return [runs.read(each) for each in runs.run_folders(folder)]
    found = []
    for state in look(said["job_id"]):
        if state.active:
            raise JobError(f"job {state.job_id} is {state.state.lower()}: watch it until it ends")
        target = folder if said.get("task") else folder_of(folder, state.task)
        target.mkdir(exist_ok=True)
        keep(target, said | state.record() | {"folder": str(target)})
        found.append(runs.read(target))
        print(f"{line(state)} ({state.source})")
        if state.state != "COMPLETED":
            print("\n".join(map(tidy, log_of(folder, state.job_id)[-8:])))
    return found


def log_of(folder: Path, job_id: str | None) -> list[str]:
    """The lines of a job's log, if it came to write one."""
    log = log_path(folder, job_id)
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def said(folder: Path, rank: int | str) -> list[str]:
    """Read a rank's lines from the job's log."""
    marked = map(RANK.match, log_of(folder, known(folder)["job_id"]))
    return [tidy(found[2]) for found in marked if found and found[1] == str(rank)]


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
