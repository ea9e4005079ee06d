"""The attempts of a run that was restarted: its events, and a row for each attempt.

Notebook 11b and its figures call it, on the run's record; no rank needs it.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pandas as pd

_ENDS = {"done", "preempted", "failed"}  # events that end an attempt


class Attempt(NamedTuple):
    """One start of a run. Times are in seconds since its first start."""

    attempt: int  # from 1
    begin: float
    end: float
    from_step: int
    to_step: int  # of its last checkpoint: the next attempt resumes there
    saves: int  # checkpoints
    lost_seconds: float  # of work after the last checkpoint, which is done again
    ended: str  # done, preempted or failed; unknown if no event has it


def read_events(folder: str | Path) -> pd.DataFrame:
    """Read attempts.jsonl of a run folder: a row for each line that can be read.

    Columns: attempt, from 1; seconds since the first start; event; step. An event that ends an
    attempt has no step, and takes the step of the event before.
    """
    rows, step = [], 0
    lines = (Path(folder) / "attempts.jsonl").read_text(errors="replace").splitlines()
    for line in lines:
        with suppress(json.JSONDecodeError):  # cut off when its process died
            event = json.loads(line)
            step = event.get("step", step)
            rows.append((event["time"], event["event"], step))
    table = pd.DataFrame(rows, columns=["seconds", "event", "step"])
    table["seconds"] -= table["seconds"].min()
    table.insert(0, "attempt", (table["event"] == "started").cumsum())
    return table


def list_attempts(table: pd.DataFrame) -> list[Attempt]:
    """List the attempts in the events of a run; one without an end stops at its last event."""
    return [_attempt(number, rows) for number, rows in table.groupby("attempt")]


def _attempt(number: int, rows: pd.DataFrame) -> Attempt:
    """Return the attempt of this number, from its events."""
    ends = rows[rows["event"].isin(_ENDS)]
    saves = rows[rows["event"] == "saved"]
    first = rows.iloc[0]
    last = ends.iloc[0] if len(ends) else rows.iloc[-1]
    ended = last["event"] if last["event"] in _ENDS else "unknown"
    saved_at = saves.iloc[-1] if len(saves) else first
    return Attempt(
        attempt=number,
        begin=float(first["seconds"]),
        end=float(last["seconds"]),
        from_step=int(first["step"]),
        to_step=int(last["step"]),
        saves=len(saves),
        lost_seconds=float(last["seconds"] - saved_at["seconds"]) if ended == "failed" else 0.0,
        ended=ended,
    )
