"""Read the traces that torch.profiler writes on each rank, and split a step's time into parts.

Notebook 12 calls it, in the driver process, for a table and for a figure of lanes. A rank's time is
cut into hundredths of a millisecond; a part of it is the set of those in which it runs.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, INK, ORANGE, RED, SKY, WIDTH

Spans = list[tuple[float, float]]  # (begin, end) in ms
Mask = np.ndarray  # of bool: whether something runs in each hundredth of a millisecond

_IN_A_MS = 100

# What a rank does in a part of its time, and its colour. "hidden" runs during "compute", and takes
# no extra time.
_PARTS = {
    "data": ("waits for data", ORANGE),
    "compute": ("computes", BLUE),
    "hidden": ("all-reduces and computes", SKY),
    "exposed": ("only all-reduces", RED),
    "late": ("waits for the late rank", "white"),
}
_OF_ALL_REDUCES = ["hidden", "exposed", "late"]
_LOSSES = {  # what a rank loses, in the title's words
    "data": "waits for data",
    "exposed": "has an all-reduce that nothing hides",
    "late": "waits for the late rank",
}


@dataclass
class Trace:
    """What a rank did in the recorded steps; all ranks of a run have one clock."""

    steps: Spans
    parts: dict[str, Mask]  # since the clock's zero; all but "hidden" exclude each other


# ---- reading


def read_traces(folder: Path | str, name: str) -> list[Trace]:
    """Read NAME_rank0.json, NAME_rank1.json, … of one run, on one clock; any process may call it.

    Prints a line if the ranks recorded no all-reduce, as on simulated GPUs, or no range called
    data. Raises FileNotFoundError for a rank without a trace, ValueError for traces without steps
    or of different runs.
    """
    files = [_File(Path(folder, f"{name}_rank0.json"))]
    files += [_File(Path(folder, f"{name}_rank{rank}.json")) for rank in range(1, files[0].ranks)]
    sent = [file.collectives() for file in files]
    counts = [len(spans) for spans in sent]
    if len(set(counts)) > 1:
        told = f"{name}: ranks recorded {counts} collectives"
        raise ValueError(f"{told}: are these traces of one run?")
    if len(files) > 1 and not sent[0]:
        why = "a simulated GPU has no kernels; on a real one, also profile the activity CUDA"
        print(f"{name}: no all-reduce was recorded, so `compute` includes its time: {why}")
    if not any(file.reading() for file in files):
        cure = 'put record_function("data") around the line that gets the batch'
        print(f"{name}: no range is called data, so `other` includes its time: {cure}")
    # A node's clock may be ahead: all ranks leave an all-reduce together, so their ends align.
    for file, spans in zip(files, sent, strict=True):
        ahead = [end - other for (_, end), (_, other) in zip(spans, sent[0], strict=True)]
        file.zero = median(ahead or [0])
    earliest = min(file.steps()[0][0] for file in files)
    for file in files:
        file.zero += earliest
    begun = [[begin for begin, _ in file.collectives()] for file in files]
    joined = [max(of_all) for of_all in zip(*begun, strict=True)]  # when the last rank came
    return [_split(file, joined) for file in files]


class _File:
    """The file that a rank wrote, and the zero of its times, in ms on its own clock."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        self.ranks = content.get("distributedInfo", {}).get("world_size", 1)
        self.base = content.get("baseTimeNanoseconds", 0) / 1e6
        self.zero = 0.0
        if not self.steps():
            cure = "give profile() a schedule, and call prof.step() after each step"
            raise ValueError(f"{path.name} has no step: {cure}")

    def spans(self, category: str, name: str) -> Spans:
        """List the spans of a category's events whose name matches a pattern at its start."""
        found = []
        for event in self.events:
            if event.get("cat") == category and re.match(name, event["name"]):
                begin = self.base + event["ts"] / 1000 - self.zero
                found.append((begin, begin + event["dur"] / 1000))
        return sorted(found)

    def steps(self) -> Spans:
        """List the recorded steps."""
        return self.spans("user_annotation", r"ProfilerStep#")

    def reading(self) -> Spans:
        """List the ranges in which a rank gets a batch."""
        return self.spans("user_annotation", r"data$")

    def collectives(self) -> Spans:
        """List the collectives, of gloo or NCCL, in the order of their starts."""
        return sorted(self.spans("user_annotation", r"gloo:") + self.spans("kernel", r"nccl"))


def _split(file: _File, joined: list[float]) -> Trace:
    """Divide a rank's time into its parts; joined: when the last rank joined each collective."""
    steps, sent = file.steps(), file.collectives()
    end = steps[-1][1]
    window = _mask([(steps[0][0], end)], end)
    reading = _mask(file.reading(), end) & window
    kernels = file.spans("kernel", r"(?!nccl)")
    operators = file.spans("cpu_op", r"(?!c10d::)")
    compute = _mask(kernels, end) if kernels else _mask(operators, end) & ~reading
    compute &= window
    exchange = _mask(sent, end) & window
    pairs = zip(sent, joined, strict=True)
    before_all_came = _mask([(begin, min(last, left)) for (begin, left), last in pairs], end)
    alone = exchange & ~compute
    parts = {
        "data": reading & ~compute & ~exchange,
        "compute": compute,
        "exposed": alone & ~before_all_came,
        "late": alone & before_all_came,
        "hidden": exchange & compute,
    }
    return Trace(steps, parts)


def _mask(spans: Spans, end: float) -> Mask:
    """Mark the time from zero to an end, in ms, that is in any of the spans."""
    mask = np.zeros(round(end * _IN_A_MS), bool)
    for begin, until in spans:
        mask[max(0, round(begin * _IN_A_MS)) : max(0, round(until * _IN_A_MS))] = True
    return mask


# ---- the parts of the time


def account(traces: list[Trace]) -> pd.DataFrame:
    """Compute the milliseconds of a step and of its parts, one row per rank.

    The columns are the step, its parts, what is left of it, and the hidden all-reduces.
    """
    rows = []
    for trace in traces:
        count = len(trace.steps)
        step = (trace.steps[-1][1] - trace.steps[0][0]) / count
        parts = {name: mask.sum() / _IN_A_MS / count for name, mask in trace.parts.items()}
        hidden = parts.pop("hidden")
        other = step - sum(parts.values())
        rows.append({"step": step, **parts, "other": other, "hidden": hidden})
    return pd.DataFrame(rows).rename_axis("rank")


def draw_lanes(before: list[Trace], after: list[Trace], loss: str, where: str = "") -> Picture:
    """Draw two lanes per rank, computing and all-reduce, before and after a fix, on one time axis.

    loss: the part that the fix is for, as `account` names it. where: the machine, for the caption.
    """
    was, now = account(before), account(after)
    if loss in _OF_ALL_REDUCES and not pd.concat([was, now])[_OF_ALL_REDUCES].to_numpy().any():
        title = "No all-reduce was recorded, so its cost does not show"
    else:
        rank = was[loss].idxmax()
        title = f"Rank {rank} {_LOSSES[loss]}: "
        title += f"{was[loss][rank]:.0f} of {was['step'][rank]:.0f} ms per step, "
        title += f"then {now[loss][rank]:.0f} of {now['step'][rank]:.0f}"
    size = WIDTH, 2.3 + 1.0 * len(before)
    figure, (above, below) = plt.subplots(2, figsize=size, sharex=True, layout="constrained")
    _draw_ranks(above, before)
    above.set_title("before", loc="left")
    _draw_ranks(below, after)
    below.set_title("after", loc="left")
    below.set(xlabel="time [ms]", xlim=(0, 1.4 * was["step"].max()))
    marks = [Patch(**_look(part), label=label) for part, (label, _) in _PARTS.items()]
    above.legend(handles=marks, ncols=3, loc="lower left", bbox_to_anchor=(0.12, 0.98), fontsize=10)
    return captioned(figure, title, where, "a vertical line: a step starts")


def _draw_ranks(ax: Axes, traces: list[Trace]) -> None:
    """Draw two lanes for each rank, and a line where a step starts."""
    height = 2.3  # of the two lanes, with the space below them
    ticks, names = [], []
    for rank, trace in enumerate(traces):
        top = height * rank
        for part, mask in trace.parts.items():
            lane = top + (part not in ("data", "compute"))
            turns = np.diff(mask, prepend=False, append=False)
            spans = np.flatnonzero(turns).reshape(-1, 2) / _IN_A_MS
            bars = [(begin, end - begin) for begin, end in spans]
            ax.broken_barh(bars, (lane, 0.8), **_look(part))
        starts = [begin for begin, _ in trace.steps]
        ax.vlines(starts, top - 0.15, top + 1.8, color=INK, linewidth=1)
        ticks += [top + 0.4, top + 1.4]
        names += [f"rank {rank}", "its all-reduces"]
    bottom = height * len(traces) - 0.4
    ax.set(ylim=(bottom, -0.2), yticks=ticks, yticklabels=names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _look(part: str) -> dict[str, Any]:
    """Return the look of a part: its colour; hatched if a rank only waits for another."""
    _, colour = _PARTS[part]
    if part == "late":
        return {"facecolor": colour, "hatch": "////", "edgecolor": GREY, "linewidth": 0.5}
    return {"facecolor": colour, "linewidth": 0}
