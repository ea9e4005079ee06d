"""Read what a run that took several attempts wrote down: every event, and a row for each attempt."""

import sys
from pathlib import Path

import pandas as pd

from ddp_helpers.notebook.fields import finite, parsed, text, whole

COLUMNS = ["attempt", "seconds", "event", "step"]
NEEDED = {"time": finite, "event": text, "step": whole}  # in each line, and in those of some events
NEEDED_BY = {"started": {"world_size": whole}, "epoch": {"epoch": whole, "weights": text}}
ENDS = {"done", "preempted", "failed", "killed"}  # "killed" is written by who killed it: the run itself could not


def events(folder: str | Path) -> pd.DataFrame:
    """A row for each line of the run's attempts.jsonl: its attempt, from 1; seconds since the first start; what, where.

    What else a line holds has a column of its own. A line that cannot be read is named on stderr and left out.
    """
    path = Path(folder) / "attempts.jsonl"
    try:
        lines = path.read_text(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        print(f"{path.parent.name}: no attempts ({type(error).__name__})", file=sys.stderr)
        lines = []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            one = parsed(line)
            needed = NEEDED | NEEDED_BY.get(one["event"], {})
            if wrong := [name for name, fits in needed.items() if not fits(one[name])]:
                raise ValueError(wrong)
            found.append(one)
        except (ValueError, KeyError, TypeError):
            print(f"{path.parent.name}: attempts.jsonl line {number}: half-written, left out", file=sys.stderr)
    table = pd.DataFrame(found, columns=None if found else ["time", "event", "step"])
    table["attempt"] = (table["event"] == "started").cumsum().clip(lower=1)
    table["seconds"] = table["time"] - table["time"].min()
    return table[COLUMNS + [name for name in table if name not in (*COLUMNS, "time")]]


def attempts(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each attempt: from which second and step to which, how it ended, steps saved, and steps lost.

    The first word on the end counts: ranks that outlive a killed one report later that they failed. An attempt without
    one has the end "unknown", and the second and step at which it was last heard of.
    Lost are the steps after its last checkpoint: the next attempt does them again.
    """
    rows = []
    for number, mine in table.groupby("attempt"):
        ends, saved = mine[mine["event"].isin(ENDS)], mine[mine["event"] == "saved"]
        first, last = mine.iloc[0], ends.iloc[0] if len(ends) else mine.iloc[-1]
        reached = saved["step"].max() if len(saved) else first["step"]
        ranks = pd.Series(first.get("world_size")).dropna().astype(int)  # empty where the first line is not a start
        row = {"attempt": number, "ranks": ranks.max() if len(ranks) else 0}
        row |= {"begin": first["seconds"], "end": last["seconds"]}
        row |= {"from_step": first["step"], "to_step": last["step"], "saves": len(saved)}
        row |= {"lost_steps": last["step"] - reached, "ended": last["event"] if last["event"] in ENDS else "unknown"}
        rows.append(row)
    return pd.DataFrame(rows)


def weights(table: pd.DataFrame) -> dict[int, str]:
    """The digest of all weights after each epoch, as the last attempt that finished the epoch has it."""
    done = table[table["event"] == "epoch"]
    return {int(epoch): digest for epoch, digest in zip(done.get("epoch", []), done.get("weights", []), strict=True)}
