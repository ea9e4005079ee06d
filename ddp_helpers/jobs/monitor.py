"""Watch a submitted job, read its ranks' output, and collect how it ended.

The driver process calls it, on the login node; a different process can call it later.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from ddp_helpers.jobs.files import (
    RANK,
    JobRecord,
    folder_of,
    ids_of,
    keep,
    log_of,
    log_path,
    read_job_record,
)
from ddp_helpers.jobs.job import JobError
from ddp_helpers.jobs.queue import State, moment, states_of_job
from ddp_helpers.launch.screen import Screen, shorten_paths
from ddp_helpers.records import runs

# Reasons for which a job never starts, on a cluster that does not refuse it at once
# (EnforcePartLimits=NO).
_NEVER_STARTS = {
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "BadConstraints",
}
_REFRESH_SECONDS = 0.3
_LONGEST_INTERVAL = 10  # seconds between two queries of the controller
_SHOWN_LINES = 8  # of the log of a job that failed
_VERDICT = "explain says of this log:"  # the job file writes the explanation after it


def watch(folder: Path) -> None:
    """Show a live line for the job, or for each task of its array, and the lines of its ranks.

    Returns when the job has ended. Interrupted, it leaves the job alone.
    """
    folder = Path(folder)
    ids = ids_of(folder, read_job_record(folder))
    if not ids:
        return  # it ran on this machine, and is over
    job_id = ids[-1]
    log = _lines_as_they_come(log_path(folder, job_id))
    screen = Screen()
    begin, next_look = time.monotonic(), 0.0
    states: list[State] = []
    try:
        while not states or any(state.active for state in states):
            time.sleep(_REFRESH_SECONDS)
            if time.monotonic() > next_look:
                states = states_of_job(job_id)
                # Often at first, then at an interval that does not load the controller.
                interval = _REFRESH_SECONDS + (time.monotonic() - begin) / 50
                next_look = time.monotonic() + min(_LONGEST_INTERVAL, interval)
            for state in states:
                screen.put(state.job_id, _status_line(state))
            for rank, text in next(log):
                screen.add(f"rank {rank}" if rank else "", text)
    except KeyboardInterrupt:
        print(f"job {job_id} continues: watch it again, or end it with cancel({job_id!r})")
        raise
    finally:
        screen.draw()


def _status_line(state: State) -> str:
    """Describe the state of a job in one line."""
    if state.state == "PENDING":
        reason = f" ({state.reason})" if state.reason not in ("", "None") else ""
        if state.reason in _NEVER_STARTS:
            reason += ": it can never start; cancel it and request less"
        return f"job {state.job_id}: pending{reason}"
    begin, end = moment(state.started), moment(state.ended)
    if state.active:
        ran = (datetime.now() - begin).total_seconds() if begin else 0
        return f"job {state.job_id}: {state.state.lower()} on {state.nodes} for {ran:.0f} s"
    took = f" after {(end - begin).total_seconds():.0f} s" if begin and end else ""
    ended = f"{state.state}{took}, exit code {state.exit_code}, on {state.nodes}"
    return f"job {state.job_id}: {ended}"


def _lines_as_they_come(log: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield the log's new lines since the last time, as pairs of rank ('' for none) and text."""
    position, unfinished = 0, ""
    while True:
        new = ""
        if log.exists():
            with log.open(errors="replace") as file:
                file.seek(position)
                new = file.read()
                position = file.tell()
        *lines, unfinished = (unfinished + new).split("\n")
        yield [_rank_and_text(line) for line in lines]


def _rank_and_text(line: str) -> tuple[str, str]:
    """Split a line of the log into its rank, '' for none, and its text."""
    marked = RANK.match(line)
    return (marked[1], marked[2]) if marked else ("", line)


def collect(folder: Path) -> list[runs.RunRecord]:
    """Return the record of the job's run, or of each array task, with its end as Slurm reports it.

    Of several submissions, a completed one counts. Raises JobError if a job has not ended.
    """
    folder, record = Path(folder).absolute(), read_job_record(folder)
    ids = ids_of(folder, record)
    if not ids:
        return _collect_local(folder, record)
    if (original := record.get("folder", str(folder))) != str(folder):
        # A different job may have its number here.
        copied = f"copied from {shorten_paths(original)}"
        print(f"{copied}: this Slurm is not asked about job {record['job_id']}")
        return [runs.read_run(path) for path in runs.run_folders(folder)]
    states = _last_states(folder, record, ids[-1])
    return [_collect_task(folder, record, state) for state in states]


def _collect_local(folder: Path, record: JobRecord) -> list[runs.RunRecord]:
    """The records of a job that ran on this machine. Raises JobError if it was not submitted."""
    if record["state"] == "WRITTEN":
        waits = "holds a job that was not submitted, or waits"
        raise JobError(f"{shorten_paths(str(folder))} {waits}: submit it first")
    tasks = len(record["job"]["array"])
    if record.get("task") or not tasks:
        return [runs.read_run(folder)]
    return [runs.read_run(folder_of(folder, str(task))) for task in range(tasks)]


def _last_states(folder: Path, record: JobRecord, job_id: str) -> list[State]:
    """The state of each task of a job: of the submission that completed, else of the first.

    Raises JobError if one is active, or if Slurm has a record of none.
    """
    ended: dict[str, State] = {}
    for state in states_of(folder, record) or states_of_job(job_id):
        if state.active:
            activity = f"job {state.job_id} is {state.state.lower()}"
            raise JobError(f"{activity}: watch it until it ends")
        if state.task not in ended or ended[state.task].state != "COMPLETED":
            ended[state.task] = state
    return list(ended.values())


def _collect_task(folder: Path, record: JobRecord, state: State) -> runs.RunRecord:
    """Note in job.json how one task ended, print it, and return the record of its run."""
    target = folder if record.get("task") else folder_of(folder, state.task)
    target.mkdir(exist_ok=True)
    keep(target, record | state.record() | {"folder": str(target)})
    run = runs.read_run(target)
    print(f"{_status_line(state)} ({state.source})")
    if state.state != "COMPLETED":
        lines = list(takewhile(_VERDICT.__ne__, log_of(folder, state.job_id)))
        print("\n".join(map(shorten_paths, lines[-_SHOWN_LINES:])))
    return run


def states_of(folder: Path, record: JobRecord) -> list[State]:
    """The states of all submissions of a job, oldest first, if Slurm still has them."""
    states = []
    for job_id in ids_of(folder, record):
        with suppress(JobError):
            states += states_of_job(job_id)
    return states


def rank_lines(folder: Path, rank: int | str) -> list[str]:
    """Read a rank's lines from the log of the job's last submission."""
    ids = ids_of(Path(folder), read_job_record(folder))
    lines = log_of(folder, ids[-1] if ids else None)
    marked = [_rank_and_text(line) for line in lines]
    return [shorten_paths(text) for source, text in marked if source == str(rank)]
