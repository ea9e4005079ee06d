"""Read the traces that torch.profiler writes on each rank, and find where a step's time goes.

Notebook 12 calls it, in its own process, for a table and for a figure of lanes; one of its ranks
calls it, too.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypedDict

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, INK, ORANGE, RED, SKY, WIDTH

Spans = list[tuple[float, float]]  # (begin, end) in ms


class _Part(NamedTuple):
    """A part of a rank's time: what the rank does in it, and its colour."""

    label: str
    colour: str


# "hidden" runs beside "compute", and takes no time of its own.
_PARTS = {
    "data": _Part("waits for data", ORANGE),
    "compute": _Part("computes", BLUE),
    "hidden": _Part("all-reduces and computes", SKY),
    "exposed": _Part("only all-reduces", RED),
    "late": _Part("waits for the late rank", "white"),
}
_LOSSES = {  # what a rank loses, as the title says it
    "data": "waits for data",
    "exposed": "has an all-reduce that nothing hides",
    "late": "waits for the late rank",
}


@dataclass
class Trace:
    """What a rank did in the recorded steps, in ms since rank 0 began the first of them."""

    rank: int
    steps: Spans
    data: Spans  # the ranges named "data"
    compute: Spans  # operators on a CPU; kernels on a GPU
    sent: Spans  # collectives, in the order in which they began
    late: Spans = field(default_factory=list)  # from a collective's begin until all have joined


# ---- reading


def read_traces(folder: Path | str, name: str) -> list[Trace]:
    """Read NAME_rank0.json, NAME_rank1.json, … of one run, on one clock; any process may call it.

    Raises ValueError, in one line, where a trace is missing, not whole, or of another run.
    """
    paths = list(Path(folder).glob(f"{name}_rank*.json"))
    paths.sort(key=lambda path: (len(path.name), path.name))  # rank 10 after rank 9
    if not paths:
        raise ValueError(f"no {name}_rank0.json in {folder}: run the cell that writes it")
    traces, world_sizes = [], []
    for rank, path in enumerate(paths):
        trace, world_size = _read_rank(rank, path)
        traces.append(trace)
        world_sizes.append(world_size)
    sent = [len(trace.sent) for trace in traces]
    if any(sent) and len(traces) != world_sizes[0]:
        counts = f"{len(traces)} traces of {world_sizes[0]} ranks"
        raise ValueError(f"{name}: {counts}: run the cell that writes them again")
    if len(set(sent)) > 1:
        counts = f"ranks recorded {sent} collectives"
        raise ValueError(f"{name}: {counts}: are these traces of one run?")
    _align(traces)
    return traces


class _Event(TypedDict):
    """A range of time in a trace of the profiler, in microseconds."""

    cat: str
    name: str
    ts: float
    dur: float


def _read_rank(rank: int, path: Path) -> tuple[Trace, int]:
    """Read one rank's trace, on its own clock, and the number of ranks of its run."""
    try:
        content = json.loads(path.read_text())
        events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        base = content.get("baseTimeNanoseconds", 0) / 1e6
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{path.name} is no whole trace ({error})"
        raise ValueError(f"{reason}: run the cell that writes it again") from None
    steps = _spans_of(events, base, "user_annotation", r"ProfilerStep#")
    data = _spans_of(events, base, "user_annotation", r"data$")
    if not steps:
        cure = "give profile() a schedule, and call prof.step() after each step"
        raise ValueError(f"{path.name} has no step: {cure}")
    on_gloo = _spans_of(events, base, "user_annotation", r"gloo:")
    on_nccl = _spans_of(events, base, "kernel", r"nccl")
    compute = _spans_of(events, base, "kernel", r"(?!nccl)")
    if not compute:
        compute = difference(_spans_of(events, base, "cpu_op", r"(?!c10d::)"), data)
    compute = intersection(compute, [(steps[0][0], steps[-1][1])])
    world_size = content.get("distributedInfo", {}).get("world_size", 1)
    return Trace(rank, steps, data, compute, sorted(on_gloo + on_nccl)), world_size


def _spans_of(events: list[_Event], base: float, category: str, name: str) -> Spans:
    """List the spans of the events of a category whose name begins with a pattern, in order.

    base: ms that are added to their times.
    """
    spans = []
    for event in events:
        if event.get("cat") == category and re.match(name, event["name"]):
            end = event["ts"] + event["dur"]
            spans.append((base + event["ts"] / 1000, base + end / 1000))
    return sorted(spans)


def _align(traces: list[Trace]) -> None:
    """Put all ranks on one clock, which starts with rank 0's first step.

    Marks who waits for the last rank.
    """
    rank_0 = traces[0]
    start = rank_0.steps[0][0]
    for trace in reversed(traces):  # rank 0, which the others are compared with, comes last
        _shift(trace, start + _clock_offset(trace.sent, rank_0.sent))
    collectives = zip(*(trace.sent for trace in traces), strict=True)
    joined = [max(begin for begin, _ in spans) for spans in collectives]
    for trace in traces:
        pairs = zip(trace.sent, joined, strict=True)
        trace.late = [(begin, min(last, end)) for (begin, end), last in pairs]


def _clock_offset(sent: Spans, reference: Spans) -> float:
    """Compute by how many ms a rank's clock is ahead of rank 0's; 0 if they may be the same.

    No all-reduce ends before the last rank has joined: if one seems to, the nodes' clocks differ.
    """
    pairs = list(zip(sent, reference, strict=True))
    if all(begin < other_end and other < end for (begin, end), (other, other_end) in pairs):
        return 0
    return median(end - other_end for (_, end), (_, other_end) in pairs)


def _shift(trace: Trace, zero: float) -> None:
    """Count the times of a trace from another zero, in ms."""
    trace.steps = _since(trace.steps, zero)
    trace.data = _since(trace.data, zero)
    trace.compute = _since(trace.compute, zero)
    trace.sent = _since(trace.sent, zero)


def _since(spans: Spans, zero: float) -> Spans:
    """Count the times of spans from another zero, in ms."""
    return [(begin - zero, end - zero) for begin, end in spans]


# ---- spans of time


def union(spans: Spans) -> Spans:
    """Merge spans that overlap; returns the same time, in order."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def difference(spans: Spans, others: Spans) -> Spans:
    """Return the time of the spans in which none of the others is."""
    rest: Spans = []
    cuts, first = union(others), 0
    for begin, end in union(spans):
        while first < len(cuts) and cuts[first][1] <= begin:
            first += 1
        for index in range(first, len(cuts)):
            cut_begin, cut_end = cuts[index]
            if cut_begin >= end:
                break
            if cut_begin > begin:
                rest.append((begin, cut_begin))
            begin = cut_end
        if begin < end:
            rest.append((begin, end))
    return rest


def intersection(spans: Spans, others: Spans) -> Spans:
    """Return the time that is in the spans and in the others."""
    return difference(spans, difference(spans, others))


# ---- where the time goes


def _split(trace: Trace) -> dict[str, Spans]:
    """Return the time of a rank by part. All but the hidden all-reduces exclude each other."""
    alone = difference(trace.sent, trace.compute)
    late = intersection(alone, trace.late)
    return {
        "data": difference(trace.data, trace.compute + trace.sent),
        "compute": union(trace.compute),
        "exposed": difference(alone, late),
        "late": late,
        "hidden": intersection(trace.sent, trace.compute),
    }


def account(traces: list[Trace]) -> pd.DataFrame:
    """Compute the milliseconds of a step and of its parts, a rank a row.

    The columns are the step, its parts, what is left of it, and the hidden all-reduces.
    """
    rows = {}
    for trace in traces:
        count = len(trace.steps)
        step = (trace.steps[-1][1] - trace.steps[0][0]) / count
        parts = {}
        for part, spans in _split(trace).items():
            parts[part] = sum(end - begin for begin, end in spans) / count
        hidden = parts.pop("hidden")
        other = step - sum(parts.values())
        rows[trace.rank] = {"step": step, **parts, "other": other, "hidden": hidden}
    return pd.DataFrame(rows).T.rename_axis("rank")


def draw_lanes(before: list[Trace], after: list[Trace], loss: str, where: str = "") -> Picture:
    """Draw two lanes a rank, computing and all-reduce, before and after a cure, on one time axis.

    loss: the part that was to be cured, as `account` names it. where: the machine, for the caption.
    """
    was, now = account(before), account(after)
    rank = was[loss].idxmax()
    title = f"Rank {rank} {_LOSSES[loss]}: "
    title += f"{was[loss][rank]:.0f} of {was['step'][rank]:.0f} ms a step, "
    title += f"then {now[loss][rank]:.0f} of {now['step'][rank]:.0f}"
    size = WIDTH, 2.3 + 1.0 * len(before)
    figure, (above, below) = plt.subplots(2, figsize=size, sharex=True, layout="constrained")
    _draw_ranks(above, before)
    above.set_title("before", loc="left")
    _draw_ranks(below, after)
    below.set_title("after", loc="left")
    below.set(xlabel="time [ms]", xlim=(0, 1.4 * was["step"].max()))
    marks = [Patch(**_look(name), label=part.label) for name, part in _PARTS.items()]
    above.legend(handles=marks, ncols=3, loc="lower left", bbox_to_anchor=(0.12, 0.98), fontsize=10)
    return captioned(figure, title, where, "a vertical line: a step begins")


_RANK_HEIGHT = 2.3  # of the two lanes of a rank, with the space below them


def _draw_ranks(ax: Axes, traces: list[Trace]) -> None:
    """Draw two lanes for each rank, and a line where a step begins."""
    ticks, names = [], []
    for index, trace in enumerate(traces):
        top = _RANK_HEIGHT * index
        for part, spans in _split(trace).items():
            lane = top + (part not in ("data", "compute"))
            bars = [(begin, end - begin) for begin, end in spans]
            ax.broken_barh(bars, (lane, 0.8), **_look(part))
        starts = [begin for begin, _ in trace.steps]
        ax.vlines(starts, top - 0.15, top + 1.8, color=INK, linewidth=1)
        ticks += [top + 0.4, top + 1.4]
        names += [f"rank {trace.rank}", "its all-reduces"]
    bottom = _RANK_HEIGHT * len(traces) - 0.4
    ax.set(ylim=(bottom, -0.2), yticks=ticks, yticklabels=names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


class _Look(TypedDict, total=False):
    """How a part is drawn: the properties of its patches."""

    facecolor: str
    edgecolor: str
    hatch: str
    linewidth: float


def _look(part: str) -> _Look:
    """Return how a part is drawn: in its colour; hatched where a rank only waits for another."""
    colour = _PARTS[part].colour
    if part == "late":
        return {"facecolor": colour, "hatch": "////", "edgecolor": GREY, "linewidth": 0.5}
    return {"facecolor": colour, "linewidth": 0}
