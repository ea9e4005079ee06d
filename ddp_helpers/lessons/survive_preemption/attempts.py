"""Tables of notebook 11: the events of a run that was started more than once, and its attempts."""

import json
from contextlib import suppress
from pathlib import Path

import pandas as pd

ENDS = {"done", "preempted", "failed"}


def events(folder: str | Path) -> pd.DataFrame:
    """A row for each line of a run's attempts.jsonl: attempt, from 1; seconds since the first start; what; step."""
    found = []
    for line in (Path(folder) / "attempts.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut off when its process died
            one = json.loads(line)
            found.append((float(one["time"]), str(one["event"]), int(one["step"])))
    table = pd.DataFrame(found, columns=["seconds", "event", "step"])
    table["seconds"] -= table["seconds"].min()
    table.insert(0, "attempt", (table["event"] == "started").cumsum().clip(lower=1))
    return table


def attempts(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each attempt: from which second and step to which, how it ended, steps saved, and steps lost.

    Lost are the steps done after its last checkpoint: the next attempt does them again. An attempt without a word on
    its end has the end "unknown", and the second and step at which it was last heard of.
    """
    rows = []
    for number, mine in table.groupby("attempt"):
        ends, saved = mine[mine["event"].isin(ENDS)], mine[mine["event"] == "saved"]
        first, last = mine.iloc[0], ends.iloc[0] if len(ends) else mine.iloc[-1]
        row = {"attempt": number, "begin": first["seconds"], "end": last["seconds"]}
        row |= {"from_step": first["step"], "to_step": last["step"], "saves": len(saved)}
        row |= {"lost_steps": last["step"] - (saved["step"].max() if len(saved) else first["step"])}
        rows.append(row | {"ended": last["event"] if last["event"] in ENDS else "unknown"})
    return pd.DataFrame(rows)
