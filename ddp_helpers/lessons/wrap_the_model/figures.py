"""The figures of notebook 05: a measured step, and a sketch of buckets that fill and leave.

The notebook calls them, in its own process: the first with what its ranks noted, the others draw
from their arguments alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ddp_helpers.draw.drawing import (
    Picture,
    box,
    canvas,
    described,
    equal_parts,
    write_text,
)
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import GREY, INK, LEFT, RIGHT, SMALL, WIDTH, rank_colour

Note = tuple[str, list[int], float]  # an event, the layers that it was about, and when, in ms

# ---- a measured step


class _AllReduce(NamedTuple):
    """The all-reduce of a bucket: the layers in it, and its start and end in ms."""

    layers: list[int]
    start: float
    end: float


def _time_of(notes: Sequence[Note], event: str, layers: Sequence[int] = ()) -> float:
    """Return when an event was, in ms; if several were, the last. layers: only those of these."""
    times = []
    for noted, noted_layers, ms in notes:
        if noted == event and (not layers or list(noted_layers) == list(layers)):
            times.append(ms)
    return max(times)


def _all_reduces(notes: Sequence[Note]) -> list[_AllReduce]:
    """List a rank's all-reduces, in the order in which they started."""
    return [
        _AllReduce(layers, start, _time_of(notes, "all-reduce ends", layers))
        for event, layers, start in notes
        if event == "all-reduce starts"
    ]


def one_step(ranks: Sequence[Sequence[Note]], where: str) -> Picture:
    """Draw every rank's step: compute, gradients that become ready, the all-reduce of each bucket.

    ranks: the notes of each rank. where: the machine they were measured on, for the caption.
    """
    of_rank_0 = _all_reduces(ranks[0])
    size = WIDTH, 0.9 + len(ranks) * (1.3 + 0.32 * len(of_rank_0))
    figure, axes = plt.subplots(len(ranks), figsize=size, sharex=True, layout="constrained")
    for rank, (ax, notes) in enumerate(zip(axes, ranks, strict=True)):
        _draw_compute(ax, notes, rank_colour(rank))
        hidden = _draw_all_reduces(ax, notes)
        title = f"rank {rank}: {hidden:.0%} of the all-reduce time while backward computes"
        ax.set_title(title, loc="left")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1].set(xlabel="time since the start of the step [ms]", xlim=(0, None))
    _draw_key(axes[0])
    last_gradient = _time_of(ranks[0], "gradient ready")
    early = sum(each.start < last_gradient for each in of_rank_0)
    title = f"{early} of {len(of_rank_0)} all-reduces start while backward still computes"
    write_title(figure, title)
    write_caption(figure, f"one step, measured on {len(ranks)} ranks: {where}")
    lanes = "lanes of compute, of each layer's gradients, from the last to the first, and of "
    lanes += "each bucket's all-reduce"
    return described(figure, f"{title}, on rank 0 of {len(ranks)}: {lanes}.")


def _draw_key(ax: Axes) -> None:
    """Draw the legend of the bars."""
    all_reduce = Rectangle((0, 0), 1, 1, color=INK, alpha=0.75)
    wait = Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=INK, hatch="////", linewidth=0.5)
    names = ["all-reduce of a bucket", "backward waits for it"]
    ax.legend([all_reduce, wait], names, loc="lower left", fontsize=10)


def _draw_compute(ax: Axes, notes: Sequence[Note], colour: str) -> None:
    """Draw forward, backward with its wait for all-reduces, and step.

    Below them stands each layer's number at the time when its gradient is ready.
    """
    forward = _time_of(notes, "forward starts")
    backward = _time_of(notes, "backward starts")
    step = _time_of(notes, "step starts")
    step_end = _time_of(notes, "step ends")
    last_gradient = _time_of(notes, "gradient ready")
    _draw_phase(ax, forward, backward, colour, alpha=0.3)
    _draw_phase(ax, backward, step, colour, alpha=0.6)
    _draw_phase(ax, step, step_end, colour, alpha=0.9)
    wait = step - last_gradient
    ax.barh(0, wait, 0.75, last_gradient, color="none", edgecolor=INK, hatch="////", linewidth=0)
    ax.text((forward + backward) / 2, 0, "forward", ha="center", va="center")
    ax.text((backward + last_gradient) / 2, 0, "backward", ha="center", va="center")
    ax.text(step_end, 0, " step", va="center")
    layers = {noted[0] for event, noted, _ in notes if event == "gradient ready"}
    for layer in sorted(layers):
        ms = _time_of(notes, "gradient ready", [layer])
        ax.plot([ms, ms], [0.55, 0.8], color=INK, linewidth=1.6)
        ax.text(ms, 1.1, str(layer), ha="center", va="center", fontsize=10)


def _draw_phase(ax: Axes, start: float, end: float, colour: str, alpha: float) -> None:
    """Draw a bar of the compute lane, from start to end in ms."""
    ms = end - start
    ax.barh(0, ms, 0.75, start, color=colour, alpha=alpha, edgecolor="white", linewidth=1.5)


def _draw_all_reduces(ax: Axes, notes: Sequence[Note]) -> float:
    """Draw each bucket's all-reduce on a row of its own.

    Returns the share of their time that was before the last gradient was ready.
    """
    last_gradient = _time_of(notes, "gradient ready")
    all_reduces = _all_reduces(notes)
    hidden = 0.0
    names = ["compute", "gradient of layer"]
    rows = [2.1 + number for number in range(len(all_reduces))]
    for number, (layers, start, end) in enumerate(all_reduces):
        ax.barh(rows[number], end - start, 0.7, start, color=INK, alpha=0.75)
        hidden += max(0.0, min(end, last_gradient) - start)
        names.append(f"bucket {number}: layers {', '.join(map(str, layers[::-1]))}")
    ax.set(ylim=(len(rows) + 1.6, -0.6), yticks=[0, 1, *rows], yticklabels=names)
    return hidden / sum(end - start for _, start, end in all_reduces)


# ---- a sketch of buckets, moment by moment, whose times are made up

_BUCKETS = [(6, 5), (4, 3), (2, 1)]  # layers: backward goes from the last to the first
_LAYER_MS, _ALL_REDUCE_MS = 2, 3
BUCKET_MOMENTS = (0, 2, 4, 6, 8, 10, 12, 15)  # ms: when a gradient is ready, and when all is done


def bucket_step(ms: int) -> Picture:
    """Draw which gradients are ready, and which buckets have left, at one moment of the sketch.

    ms: one of BUCKET_MOMENTS.
    """
    ready = [layer for layer, end in _gradient_times() if end <= ms]
    title = f"{ms} ms: {_what_happens(ms, ready)}"
    ax = canvas(3.75, title)
    for text, y in {"backward": 0.83, "gradients": 1.98, "network": 3.08}.items():
        write_text(ax, LEFT, y, text, ha="left")
    columns = dict(zip(sum(_BUCKETS, ()), equal_parts(1.3, RIGHT, 6), strict=True))
    for layer, (left, width) in columns.items():
        _draw_layer(ax, (left, 0.6), width, layer, layer in ready, _computing(ms) == layer)
    for number, layers in enumerate(_BUCKETS):
        left, right = columns[layers[0]][0], sum(columns[layers[1]])
        box(ax, (left - 0.04, 1.4), (right - left + 0.08, 1.15), fill=0.04, line="--")
        missing = [f"gradient {layer}" for layer in layers if layer not in ready]
        text = "empty" if len(missing) == 2 else f"waits for {', '.join(missing)}"
        all_reduce = _all_reduce_state(ms, number)
        text = {"under way": "full, has left", "averaged": "back"}.get(all_reduce, text)
        write_text(ax, (left + right) / 2, 1.62, f"bucket {number}: {text}", **SMALL)
        for layer in set(layers) & set(ready):
            corner, width = (columns[layer][0] + 0.06, 1.9), columns[layer][1] - 0.12
            box(ax, corner, (width, 0.5), f"gradient {layer}", rank_colour(0), **SMALL)
        _draw_network(ax, (left, 2.85), right - left, all_reduce)
    write_text(ax, LEFT, 3.58, _without_overlap(), ha="left", color=GREY, **SMALL)
    return described(ax.figure, f"{title}. {_without_overlap()}")


def _without_overlap() -> str:
    """Say what the times are, and when step() would begin if buckets left only after backward."""
    backward, network = _LAYER_MS * sum(map(len, _BUCKETS)), _ALL_REDUCE_MS * len(_BUCKETS)
    times = f"A sketch with made-up times: {_LAYER_MS} ms a layer"
    times += f", {_ALL_REDUCE_MS} ms an all-reduce."
    later = f"{backward} + {network} = {backward + network} ms"
    return f"{times} Without overlap step() would begin at {later}."


def _gradient_times() -> list[tuple[int, int]]:
    """List each layer with the ms at which its gradient is ready, the last layer first."""
    layers = sum(_BUCKETS, ())
    return [(layer, _LAYER_MS * place) for place, layer in enumerate(layers, start=1)]


def _computing(ms: int) -> int | None:
    """Return the layer whose gradient is being computed; None if all are ready."""
    return next((layer for layer, end in _gradient_times() if end > ms), None)


def _all_reduce_state(ms: int, bucket: int) -> str:
    """Say where the all-reduce of a bucket is at a moment; an empty text before it starts."""
    sent = 0  # ms
    ready = dict(_gradient_times())
    for layers in _BUCKETS[: bucket + 1]:
        start = max(sent, ready[layers[-1]])
        sent = start + _ALL_REDUCE_MS
    if ms < start:
        return ""
    return "under way" if ms < sent else "averaged"


def _what_happens(ms: int, ready: Sequence[int]) -> str:
    """Say in a sentence what happens at a moment of the sketch. ready: the layers so far."""
    states = [_all_reduce_state(ms, number) for number in range(len(_BUCKETS))]
    if not ready:
        return f"backward begins with layer {_computing(ms)}, the last one"
    if states[-1] == "averaged":
        return "every gradient is the mean over the ranks, and step() begins"
    sentence = f"gradient {ready[-1]} is ready"
    number = next(place for place, layers in enumerate(_BUCKETS) if ready[-1] in layers)
    if states[number]:
        waits = "" if _computing(ms) else ", and backward only waits"
        return f"{sentence}, so bucket {number} is full and leaves{waits}"
    if "under way" in states:
        return f"{sentence}, while bucket {states.index('under way')} is under way"
    return f"{sentence}, and waits in bucket {number}"


def _draw_layer(
    ax: Axes,
    corner: tuple[float, float],
    width: float,
    layer: int,
    done: bool,
    computing: bool,
) -> None:
    """Draw a layer of the backward pass: done, computing now, or still to come."""
    text, extent = f"layer {layer}", (width, 0.46)
    if computing:
        box(ax, corner, extent, text, GREY, fill=1, weight="bold", color="white")
    else:
        box(ax, corner, extent, text, GREY, fill=0.25 * done, line="-" if done else ":")


def _draw_network(ax: Axes, corner: tuple[float, float], width: float, state: str) -> None:
    """Draw the all-reduce of a bucket, which is under way or done."""
    if state == "under way":
        text = "all-reduce under way"
        box(ax, corner, (width, 0.46), text, INK, fill=0.8, color="white", **SMALL)
    elif state:
        box(ax, corner, (width, 0.46), "averaged on all ranks", INK, fill=0.15, **SMALL)
