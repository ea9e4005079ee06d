"""A run folder's way through Slurm: its files written and submitted, the job watched, what came of it collected."""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import chdir, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from ddp_helpers.jobs.job import ARRAY, NAME, RUN_DIR, Job, JobError, check, seconds
from ddp_helpers.jobs.queue import State, available, look, moment, send
from ddp_helpers.jobs.site import Site, render
from ddp_helpers.launch.screen import Screen, tidy
from ddp_helpers.rank.files import write_whole
from ddp_helpers.records import runs

BATCH = "job.sbatch"
SUBMITTED = "submitted"  # the file in which the job file notes the id of each submission
PREPARED: dict[Path, list[Path]] = {}  # by run folder: what this process made there, and takes back if Slurm refuses
RANK = re.compile(r" *(\d+): ?(.*)")  # how srun, and torchrun as the job file starts it, mark a rank's line
# Why a job waits for ever, on a cluster that does not refuse it at once (EnforcePartLimits=NO).
NEVER = {"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"}
MOST = 8  # ranks for each CPU of this machine: more would do nothing but fill its memory


def keep(folder: Path, said: dict) -> None:
    """Write job.json whole, or not at all."""
    write_whole(folder / "job.json", f"{json.dumps(said, indent=1)}\n".encode())


def missing(folder: Path, *names: str) -> list[Path]:
    """List what is not there yet: of a job's files and these, then of the run folder and its parents, inside out."""
    files = [folder / name for name in ("job.json", BATCH, *names)]
    return [path for path in (*files, folder, *folder.parents) if not os.path.lexists(path)]


def discard(made: Iterable[Path]) -> None:
    """Remove what was made for a job that was never submitted, but for folders in which something else lies."""
    for path in made:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def known(folder: Path) -> dict:
    """Read job.json. Raises JobError where there is no job, or where it is damaged."""
    try:
        said = runs.parsed((Path(folder) / "job.json").read_text())
        if said["job_id"] is None:  # then it is still to be submitted, or ran here
            job_of(said)
        else:
            check("job_id", said["job_id"], NAME, "the number that sbatch said")
        check("state", said["state"], NAME, "a state of Slurm's")
        return said
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"{tidy(str(folder))} holds no job ({type(error).__name__}): write one first") from None


def ids_of(folder: Path, said: dict) -> list[str]:
    """The ids of all submissions of a job, oldest first: also of those by hand, once they have begun."""
    path = folder / SUBMITTED
    noted = path.read_text(errors="replace").split() if path.is_file() else []
    return list(dict.fromkeys(number for number in (*noted, said["job_id"]) if number and NAME.fullmatch(number)))


def states_of(folder: Path, said: dict) -> list[State]:
    """The states of all a job's submissions, oldest first, as far as Slurm still knows of them."""
    states = []
    for number in ids_of(folder, said):
        with suppress(JobError):
            states += look(number)
    return states


def job_of(said: dict) -> Job:
    """The job that job.json tells of. Raises JobError and the like if that is none."""
    return Job(**{key: tuple(value) if isinstance(value, list) else value for key, value in said["job"].items()})


def folder_of(folder: Path, task: str) -> Path:
    """The run folder of one task of an array; of a job without one, the folder itself."""
    return folder.with_name(f"{folder.name}-{task}") if task else folder


def log_path(folder: Path, job_id: str | None) -> Path:
    """The log of a job, or of one task of an array; of a job without Slurm, if it has no id."""
    return Path(folder) / (f"slurm-{job_id}.log" if job_id else "torchrun.log")


def write(job: Job, site: Site, folder: Path, script: str | None = None) -> Path:
    """Write the sbatch file into a run folder, beside the script that it starts, and give its path.

    script: the text of that script, to be written too; then all is taken back if Slurm refuses the job. Raises
    JobError, with nothing written, if the folder holds another run, or another script of that name.
    """
    folder = Path(folder).absolute()
    text, made, target = render(job, site, folder), missing(folder, job.program[0]), folder / job.program[0]
    try:
        if taken := [name for name in ("job.json", "spec.json", "metrics.jsonl", BATCH) if (folder / name).exists()]:
            raise JobError(f"{tidy(str(folder))} holds another run already (its {taken[0]}): choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        keep(folder, {"job": asdict(job), "site": site.name, "job_id": None, "state": "WRITTEN"})
        write_whole(folder / BATCH, text.encode())
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
    if (ids := ids_of(folder, said)) or said["state"] != "WRITTEN":
        how = f"as job {ids[-1]}" if ids else "and ran here, without Slurm"
        cure = "write a new job into a new folder"
        if said["job"].get("requeue"):
            cure = f"to go on: python -m ddp_helpers job --again {tidy(str(folder))}"
        raise JobError(f"{tidy(str(folder))} was submitted already, {how}: {cure}")
    try:
        return start(folder, said)
    except JobError:
        discard(PREPARED.pop(folder, ()))
        raise


def again(folder: Path) -> str:
    """Submit a job once more, to go on, and give its new id; raises JobError where it cannot, or has not ended."""
    folder, said = Path(folder).absolute(), known(folder)
    if not said["job"].get("requeue"):
        raise JobError(f"{tidy(str(folder))}: its script cannot go on where it stopped: write a new job")
    if (first := said.get("folder", str(folder))) != str(folder):
        raise JobError(f"{tidy(str(folder))} was copied from {tidy(first)}: let it go on there")
    if active := [state for state in states_of(folder, said) if state.active]:
        raise JobError(f"job {active[0].job_id} is {active[0].state.lower()}: it goes on by itself, watch it")
    return start(folder, said)


def start(folder: Path, said: dict) -> str:
    """Hand the job to Slurm, and note its id; a job of the site `local` runs here where no Slurm answers: id ""."""
    if not available():
        if said["site"] != "local":
            why = f"no Slurm answers here, and {said['site']} is a real cluster"
            raise JobError(f"{why}: go to its login node, or try again; to run on this machine: job local")
        run_here(folder, said)
        return ""
    number = send(folder / BATCH)
    with (folder / SUBMITTED).open("a") as file:  # beside what the job file notes: it may wait for days
        file.write(f"{number}\n")
    keep(folder, said | {"job_id": number, "state": "PENDING", "folder": str(folder)})
    print(f"submitted: job {number}")
    return number


def watch(folder: Path) -> None:
    """Show a live line for the job, or for each task of its array, and the ranks' lines as they come, until it ends.

    Interrupted, it leaves the job alone.
    """
    ids, begin, screen = ids_of(Path(folder), known(folder)), time.monotonic(), Screen()
    if not ids:
        return  # it ran here, and is over
    number = ids[-1]
    follow, next_look, states = lines_of(Path(folder) / f"slurm-{number}.log"), 0.0, []
    try:
        while not states or any(state.active for state in states):
            time.sleep(0.3)
            if time.monotonic() > next_look:
                states = look(number)
                # Often at first, then at an interval that a busy controller does not mind.
                next_look = time.monotonic() + min(10, 0.3 + (time.monotonic() - begin) / 50)
            for state in states:
                screen.put(state.job_id, line(state))
            for rank, text in follow:
                if text is None:
                    break
                screen.add(f"rank {rank}" if rank else "", text)
    except KeyboardInterrupt:
        print(f"job {number} goes on: watch it again, or end it with cancel({number!r})")
        raise
    finally:
        screen.draw()


def line(state: State) -> str:
    """One line of the queue."""
    begin, end = moment(state.started), moment(state.ended)
    if state.state == "PENDING":
        why = f" ({state.reason})" if state.reason not in ("", "None") else ""
        why += ": it can never start so, cancel it and ask for less" if state.reason in NEVER else ""
        return f"job {state.job_id}: pending{why}"
    if state.active:
        ran = (datetime.now() - begin).total_seconds() if begin else 0
        return f"job {state.job_id}: {state.state.lower()} on {state.nodes} for {ran:.0f} s"
    took = f" after {(end - begin).total_seconds():.0f} s" if begin and end else ""
    return f"job {state.job_id}: {state.state}{took}, exit code {state.exit_code}, on {state.nodes}"


def lines_of(log: Path) -> Iterator[tuple[str, str | None]]:
    """The lines of a log as it grows: the rank and what it said; ('', None) where nothing more is there yet."""
    place, rest = 0, ""
    while True:
        if log.exists():
            with log.open(errors="replace") as file:
                file.seek(place)
                new = file.read()
                place = file.tell()
            *whole, rest = (rest + new).split("\n")
            for text in whole:
                rank = RANK.match(text)
                yield rank.groups() if rank else ("", text)
        yield "", None


def collect(folder: Path) -> list[runs.Run]:
    """The record of the job's run, or of each task of its array, with Slurm's word on how it ended.

    Of several submissions one that came to its end counts. Raises JobError if a job has not ended.
    """
    folder, said = Path(folder).absolute(), known(folder)
    if not (ids := ids_of(folder, said)) and said["state"] == "WRITTEN":
        raise JobError(f"{tidy(str(folder))} holds a job that was not submitted, or waits: submit it first")
    if not ids:
        if said.get("task"):
            return [runs.read(folder)]
        tasks = [str(task) for task in range(len(said["job"]["array"]))] or [""]
        return [runs.read(folder_of(folder, task)) for task in tasks]
    if (first := said.get("folder", str(folder))) != str(folder):  # here another job may have its number
        print(f"copied from {tidy(first)}: this Slurm is not asked about job {said['job_id']}")
        return [runs.read(each) for each in runs.run_folders(folder)]
    found, ended = [], {}
    for state in states_of(folder, said) or look(ids[-1]):
        if state.active:
            raise JobError(f"job {state.job_id} is {state.state.lower()}: watch it until it ends")
        if state.task not in ended or ended[state.task].state != "COMPLETED":
            ended[state.task] = state
    for state in ended.values():
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
    marked = map(RANK.match, log_of(folder, (ids_of(Path(folder), known(folder)) or [None])[-1]))
    return [tidy(found[2]) for found in marked if found and found[1] == str(rank)]


def run_here(folder: Path, said: dict) -> None:
    """Run the job's ranks on this machine, and keep how it ended as Slurm would. Raises JobError for too many."""
    from ddp_helpers.launch import launch  # here, since it imports IPython, which no cluster's job needs

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
