"""Notebook 11: its exercises, the attempts of a requeued job read from its record, and their timeline."""

import hashlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.notebook.drawing import GREY, INK, RED, Picture, described, rank_colour
from ddp_helpers.notebook.labels import caption
from ddp_helpers.notebook.runs import finite, parsed, text, whole
from ddp_helpers.notebook.scaling import many


def lost_steps(killed_in: int, every: int, steps_per_epoch: int) -> int:
    """Steps begun after the last checkpoint: one each `every` steps, and one after each epoch."""
    done = killed_in - 1
    return killed_in - max(done // every * every, done // steps_per_epoch * steps_per_epoch)


def newest_whole(files: dict[str, bytes]) -> str | None:
    """The newest checkpoint whose content has the SHA-256 with which its name ends; None if there is none."""
    return next((name for name in sorted(files, reverse=True) if trusted(name, files[name])), None)


def trusted(name: str, content: bytes) -> bool:
    """Whether a file is called a checkpoint, and holds what its name says."""
    stem, _, kind = name.rpartition(".")
    return kind == "pt" and stem.rpartition("-")[2] == hashlib.sha256(content).hexdigest()[:16]


def attempts_needed(work: float, limit: float, start: float, grace: float) -> int:
    """The number of attempts, if the warning always comes in time and nothing else goes wrong."""
    return math.ceil(work / (limit - start - grace))


def steps_between_saves(cost: float, between: float, step: float) -> int:
    """The best value of --checkpoint-every; at least 1. All arguments are in seconds."""
    return max(1, round(math.sqrt(2 * cost * between) / step))


def called(step: int, content: bytes) -> str:
    """The name under which the course keeps this content."""
    return f"step-{step:08}-{hashlib.sha256(content).hexdigest()[:16]}.pt"


WHOLE = {called(12, b"twelve"): b"twelve", called(9, b"nine"): b"nine"}
FLIPPED = {**WHOLE, called(15, b"fifteen"): b"fiftein"}
SAVING = {"saving.part": b"eigh", **FLIPPED}
NOTHING = {called(3, b"three"): b"thr", "saving.part": b""}

EXERCISES = [
    Exercise(
        lost_steps,
        [(14, 5, 20), (20, 5, 20), (23, 5, 22), (1, 5, 20), (33, 100, 20)],
        {
            "There is a checkpoint after each epoch, too.": lambda killed_in, every, steps_per_epoch: (
                killed_in - (killed_in - 1) // every * every
            ),
            "The step in which it dies is not done, so it cannot have been saved; it counts as lost.": (
                lambda killed_in, every, steps_per_epoch: (
                    killed_in - max(killed_in // every * every, killed_in // steps_per_epoch * steps_per_epoch)
                )
            ),
            "The step in which it dies has to be done again, too.": lambda killed_in, every, steps_per_epoch: (
                lost_steps(killed_in, every, steps_per_epoch) - 1
            ),
        },
    ),
    Exercise(
        newest_whole,
        [(WHOLE,), (FLIPPED,), (SAVING,), (NOTHING,)],
        {
            "The newest by name may be damaged: compare the digest of its content.": lambda files: max(
                [name for name in files if name.endswith(".pt")], default=None
            ),
            "That is whole, and not the newest: the step stands in the name.": lambda files: min(
                [name for name in files if trusted(name, files[name])], default=None
            ),
            "If no file is whole, give None: a damaged checkpoint is worse than none.": lambda files: (
                newest_whole(files) or max(files)
            ),
        },
    ),
    Exercise(
        attempts_needed,
        [(24, 4, 0.25, 0.25), (3, 4, 0.25, 0.25), (3.75, 4, 0.25, 0.25), (7, 4, 0.25, 0.25), (24, 2, 0.5, 0.25)],
        {
            "Each attempt starts anew, and stops at its warning: both times are lost to the work.": (
                lambda work, limit, start, grace: math.ceil(work / limit)
            ),
            "A part of an attempt is an attempt: round up.": lambda work, limit, start, grace: round(
                work / (limit - start - grace)
            ),
            "If the work fits exactly, no further attempt is needed: round up, instead of adding one.": (
                lambda work, limit, start, grace: int(work / (limit - start - grace)) + 1
            ),
        },
    ),
    Exercise(
        steps_between_saves,
        [(2.0, 86_400.0, 0.5), (30.0, 3600.0, 1.5), (0.1, 3600.0, 60.0)],
        {
            "That is the interval in seconds; divide it by the seconds of a step.": lambda cost, between, step: round(
                math.sqrt(2 * cost * between)
            ),
            "The formula has a 2 under the root: half an interval is lost on average.": lambda cost, between, step: max(
                1, round(math.sqrt(cost * between) / step)
            ),
            "No less than one step: nothing can be saved in the middle of one.": lambda cost, between, step: round(
                math.sqrt(2 * cost * between) / step
            ),
        },
    ),
]


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


def digests(table: pd.DataFrame) -> dict[int, str]:
    """The digest of all weights after each epoch, as the last attempt that finished the epoch has it."""
    done = table[table["event"] == "epoch"]
    return {int(epoch): digest for epoch, digest in zip(done.get("epoch", []), done.get("weights", []), strict=True)}


LEGEND = (
    "ticks are checkpoints, diamonds ends of epochs, arrows the time until the next attempt has started",
    "hatched is work that was lost, and done again",
)


def attempts_timeline(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """A panel for each run, a lane for each attempt. runs: what attempts.events gives, by the title of the panel."""
    tables = {title: attempts(events) for title, events in runs.items()}
    heights = [max(1, len(table)) for table in tables.values()]
    figure, panels = plt.subplots(
        len(runs),
        figsize=(9.5, 0.9 + 0.62 * len(runs) + 0.6 * sum(heights)),
        height_ratios=[height + 0.35 for height in heights],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    width = max((table["end"].max() for table in tables.values() if len(table)), default=1)
    for ax, (title, events) in zip(panels[:, 0], runs.items(), strict=True):
        ax.set_title(title, loc="left")
        _panel(ax, events, tables[title])
    panels[-1, 0].set(xlabel="seconds since the run first started", xlim=(-0.01 * width, 1.3 * width))
    caption(figure, *LEGEND)
    said = "; ".join(f"{title}: {_told(table)}" for title, table in tables.items())
    return described(figure, f"The attempts of {many(len(runs), 'run')} on a time axis, a lane for each. {said}.")


def _panel(ax: Axes, events: pd.DataFrame, table: pd.DataFrame) -> None:
    """The lanes of one run, the first attempt on top."""
    before = None
    for lane, one in enumerate(table.itertuples()):
        mine, colour = events[events["attempt"] == one.attempt], rank_colour(lane)
        ax.barh(lane, one.end - one.begin, 0.5, one.begin, color=colour, alpha=0.3)
        saved = mine.loc[mine["event"] == "saved", "seconds"]
        ax.vlines(saved, lane - 0.25, lane + 0.25, color=colour, linewidth=1.8, zorder=4)
        ends = mine.loc[mine["event"] == "epoch", "seconds"]
        ax.plot(ends, [lane - 0.25] * len(ends), "D", color=INK, markersize=5, zorder=5)
        if one.lost_steps:
            since = saved.max() if len(saved) else one.begin
            ax.barh(lane, one.end - since, 0.5, since, facecolor="white", edgecolor=RED, hatch="////", zorder=3)
        ax.text(one.end, lane, f"  {_end(one)}", va="center", zorder=6)
        if before is not None and one.begin > before:
            ax.annotate("", (one.begin, lane), (before, lane), arrowprops={"arrowstyle": "->", "color": GREY})
            middle = (before + one.begin) / 2
            ax.text(middle, lane + 0.3, f"{one.begin - before:.1f} s", ha="center", va="center", color=GREY)
        before = one.end
    names = [f"attempt {one.attempt}\n{many(one.ranks, 'rank')}" for one in table.itertuples()]
    ax.set(ylim=(max(1, len(table)) - 0.45, -0.6))
    ax.set_yticks(range(len(names)), names, fontsize=10)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _end(one: object) -> str:
    """Describe an attempt's end in a few words."""
    at = {"unknown": "ended without a word after", "killed": "killed in", "failed": "failed in"}
    text = f"{at.get(one.ended, one.ended + ' after')} step {one.to_step}"
    if one.ended == "done":
        return text
    return f"{text}, {many(one.lost_steps, 'step')} lost" if one.ended != "unknown" else text


def _told(table: pd.DataFrame) -> str:
    """The same in words, for who cannot see it."""
    return ", then ".join(
        f"attempt {one.attempt} from second {one.begin:.1f} to {one.end:.1f}, {many(one.saves, 'checkpoint')}, "
        f"{_end(one)}"
        for one in table.itertuples()
    )
