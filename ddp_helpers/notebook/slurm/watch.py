"""A live line for each job in the queue, and its ranks' lines as they come."""

import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ddp_helpers.notebook.screen import Screen
from ddp_helpers.notebook.slurm.files import known
from ddp_helpers.notebook.slurm.queue import State, look, moment

RANK = re.compile(r" *(\d+): ?(.*)")  # how srun, and torchrun as the job file starts it, mark a rank's line

# Why a job waits for ever, on a cluster that does not refuse it at once (EnforcePartLimits=NO).
NEVER = {"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"}


def watch(folder: Path) -> None:
    """Show a live line for the job, or for each task of its array, and the ranks' lines as they come, until it ends.

    Interrupted, it leaves the job alone.
    """
    number, begin, screen = known(folder)["job_id"], time.monotonic(), Screen()
    if not number:
        return  # it ran here, and is over
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
