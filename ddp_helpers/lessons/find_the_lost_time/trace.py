"""Read the traces that torch.profiler writes on each rank: where the time of a step goes, as a table and as lanes."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, INK, ORANGE, RED, SKY, WIDTH

Spans = list[tuple[float, float]]  # (begin, end) in ms

# What a rank does with its time, and the colour of that. "hidden" runs beside "compute", and takes no time of its own.
PARTS = {
    "data": ("waits for data", ORANGE),
    "compute": ("computes", BLUE),
    "hidden": ("all-reduces and computes", SKY),
    "exposed": ("only all-reduces", RED),
    "late": ("waits for the late rank", "white"),
}


@dataclass
class Trace:
    """What a rank did in the recorded steps, in ms since rank 0 began the first of them."""

    rank: int
    steps: Spans
    data: Spans  # the ranges named "data"
    compute: Spans  # operators on a CPU; kernels on a GPU
    sent: Spans  # collectives, in the order in which they began
    late: Spans = field(default_factory=list)  # from a collective's begin until the last rank had joined it


# ---- reading


def read(folder: Path | str, name: str) -> list[Trace]:
    """Read NAME_rank0.json, NAME_rank1.json, … of one run, on one clock; any process may call it.

    Raises ValueError, in one line, where a trace is missing, not whole, or of another run.
    """
    paths = sorted(Path(folder).glob(f"{name}_rank*.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise ValueError(f"no {name}_rank0.json in {folder}: run the cell that writes it")
    traces, counts = map(list, zip(*map(_one, range(len(paths)), paths), strict=True))
    sent = [len(trace.sent) for trace in traces]
    if any(sent) and len(traces) != counts[0]:
        raise ValueError(f"{name}: {len(traces)} traces of {counts[0]} ranks: run the cell that writes them again")
    if len(set(sent)) > 1:
        raise ValueError(f"{name}: ranks recorded {sent} collectives: are these traces of one run?")
    _align(traces)
    return traces


def _one(rank: int, path: Path) -> tuple[Trace, int]:
    """One rank's trace, on its own clock, and the number of ranks of its run."""
    try:
        found = json.loads(path.read_text())
        events = [event for event in found["traceEvents"] if event.get("ph") == "X"]  # their times are in microseconds
        base = found.get("baseTimeNanoseconds", 0) / 1e6
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is no whole trace ({error}): run the cell that writes it again") from None

    def spans(category: str, name: str) -> Spans:
        chosen = [one for one in events if one.get("cat") == category and re.match(name, one["name"])]
        return sorted((base + one["ts"] / 1000, base + (one["ts"] + one["dur"]) / 1000) for one in chosen)

    steps, data = spans("user_annotation", r"ProfilerStep#"), spans("user_annotation", r"data$")
    if not steps:
        raise ValueError(f"{path.name} has no step: give profile() a schedule, and call prof.step() after each step")
    sent = sorted(spans("user_annotation", r"gloo:") + spans("kernel", r"nccl"))
    compute = spans("kernel", r"(?!nccl)") or minus(spans("cpu_op", r"(?!c10d::)"), data)
    compute = both(compute, [(steps[0][0], steps[-1][1])])
    return Trace(rank, steps, data, compute, sent), found.get("distributedInfo", {}).get("world_size", 1)


def _align(traces: list[Trace]) -> None:
    """Put all ranks on one clock, which starts with rank 0's first step, and mark who waits for the last rank."""
    first, begin = traces[0], traces[0].steps[0][0]
    for trace in reversed(traces):  # rank 0, which the others are compared with, comes last
        pairs = list(zip(trace.sent, first.sent, strict=True))
        meet = all(mine[0] < its[1] and its[0] < mine[1] for mine, its in pairs)
        # No all-reduce ends before the last rank has joined: if one seems to, the nodes' clocks differ.
        zero = begin + (0 if meet else median(mine[1] - its[1] for mine, its in pairs))
        for name in ("steps", "data", "compute", "sent"):
            setattr(trace, name, [(one - zero, end - zero) for one, end in getattr(trace, name)])
    joined = [max(one for one, _ in each) for each in zip(*(trace.sent for trace in traces), strict=True)]
    for trace in traces:
        trace.late = [(one, min(last, end)) for (one, end), last in zip(trace.sent, joined, strict=True)]


# ---- spans of time


def union(spans: Spans) -> Spans:
    """The same time without overlaps, in order."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def minus(spans: Spans, others: Spans) -> Spans:
    """The time of the spans in which none of the others is."""
    left, cuts, first = [], union(others), 0
    for begin, end in union(spans):
        while first < len(cuts) and cuts[first][1] <= begin:
            first += 1
        for here in range(first, len(cuts)):
            cut, until = cuts[here]
            if cut >= end:
                break
            if cut > begin:
                left.append((begin, cut))
            begin = until
        if begin < end:
            left.append((begin, end))
    return left


def both(spans: Spans, others: Spans) -> Spans:
    """The time that is in the spans and in the others."""
    return minus(spans, minus(spans, others))


# ---- where the time goes


def split(trace: Trace) -> dict[str, Spans]:
    """The time of a rank by PARTS. All but the hidden all-reduces exclude each other."""
    alone = minus(trace.sent, trace.compute)
    late = both(alone, trace.late)
    parts = {"data": minus(trace.data, trace.compute + trace.sent), "compute": union(trace.compute)}
    return parts | {"exposed": minus(alone, late), "late": late, "hidden": both(trace.sent, trace.compute)}


def account(traces: list[Trace]) -> pd.DataFrame:
    """Milliseconds of a step, a rank a row: the step, its parts, what is left of it, and the hidden all-reduces."""
    rows = {}
    for trace in traces:
        steps, spent = len(trace.steps), trace.steps[-1][1] - trace.steps[0][0]
        ms = {part: sum(end - begin for begin, end in spans) / steps for part, spans in split(trace).items()}
        hidden = ms.pop("hidden")
        rows[trace.rank] = {"step": spent / steps} | ms | {"other": spent / steps - sum(ms.values()), "hidden": hidden}
    return pd.DataFrame(rows).T.rename_axis("rank")


def lanes(before: list[Trace], after: list[Trace], loss: str, where: str = "") -> Picture:
    """Two lanes a rank, computing and all-reduce, before and after a cure, on one axis of time.

    loss: the part that was to be cured, one of PARTS. where: the machine, for the caption.
    """
    was, now = account(before), account(after)
    rank = was[loss].idxmax()
    title = f"Rank {rank} {PARTS[loss][0]}: {was[loss][rank]:.0f} of {was['step'][rank]:.0f} ms a step,"
    title += f" then {now[loss][rank]:.0f} of {now['step'][rank]:.0f}"
    figure, axes = plt.subplots(2, figsize=(WIDTH, 2.3 + 1.0 * len(before)), sharex=True, layout="constrained")
    for ax, traces, when in zip(axes, (before, after), ("before", "after"), strict=True):
        _draw(ax, traces)
        ax.set_title(when, loc="left")
    axes[1].set(xlabel="time [ms]", xlim=(0, 1.4 * was["step"].max()))
    marks = [Patch(**_look(part), label=words) for part, (words, _) in PARTS.items()]
    axes[0].legend(handles=marks, ncols=3, loc="lower left", bbox_to_anchor=(0.12, 0.98), fontsize=10)
    return captioned(figure, title, where, "a vertical line: a step begins")


def _draw(ax: Axes, traces: list[Trace]) -> None:
    """Two lanes for each rank."""
    for place, trace in enumerate(traces):
        for part, spans in split(trace).items():
            lane = 2.3 * place + (part not in ("data", "compute"))
            ax.broken_barh([(begin, end - begin) for begin, end in spans], (lane, 0.8), **_look(part))
        ax.vlines([begin for begin, _ in trace.steps], 2.3 * place - 0.15, 2.3 * place + 1.8, color=INK, linewidth=1)
    names = [name for trace in traces for name in (f"rank {trace.rank}", "its all-reduces")]
    ticks = [2.3 * place + lane + 0.4 for place in range(len(traces)) for lane in (0, 1)]
    ax.set(ylim=(2.3 * len(traces) - 0.4, -0.2), yticks=ticks, yticklabels=names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _look(part: str) -> dict:
    """How a part is drawn: in its colour, or hatched where a rank only waits for another."""
    hatched = {"hatch": "////", "edgecolor": GREY, "linewidth": 0.5}
    return {"facecolor": PARTS[part][1], **(hatched if part == "late" else {"linewidth": 0})}
