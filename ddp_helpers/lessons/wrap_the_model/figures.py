"""Figures of notebook 05: a measured step, buckets and overlap, memory of gradients, DataParallel."""

import math
from collections.abc import Sequence
from functools import partial

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from ddp_helpers.notebook.drawing import (
    CODE,
    GREY,
    INK,
    LEFT,
    RIGHT,
    SMALL,
    WIDTH,
    Picture,
    arrow,
    box,
    canvas,
    described,
    fitting,
    link,
    pieces,
    rank_colour,
    write,
)
from ddp_helpers.notebook.labels import caption

Note = tuple[str, list[int], float]  # what happened, to which layers, and when (in ms)


def at(notes: Sequence[Note], what: str, layers: Sequence[int] = ()) -> float:
    """Return the time of an event in ms; of several, the last one's."""
    return max(ms for name, which, ms in notes if name == what and (not layers or list(which) == list(layers)))


def buckets(notes: Sequence[Note]) -> list[tuple[list[int], float, float]]:
    """For each all-reduce, in the order in which they started: the layers in its bucket, its start and its end."""
    started = [(which, ms) for what, which, ms in notes if what == "all-reduce starts"]
    return [(which, ms, at(notes, "all-reduce ends", which)) for which, ms in started]


def behind_backward(notes: Sequence[Note]) -> float:
    """The share of the time of all all-reduces during which this rank was still computing gradients, 0 to 1."""
    last = at(notes, "gradient ready")
    hidden = sum(max(0.0, min(end, last) - start) for _, start, end in buckets(notes))
    return hidden / sum(end - start for _, start, end in buckets(notes))


def one_step(ranks: Sequence[Sequence[Note]], where: str) -> Picture:
    """Every rank's step as lanes: compute, gradients that become ready, and the all-reduce of each bucket.

    ranks: the notes of each rank. where: the machine they were measured on, for the caption.
    """
    rows = len(buckets(ranks[0]))
    figure, axes = plt.subplots(
        len(ranks), figsize=(WIDTH, 0.9 + len(ranks) * (1.3 + 0.32 * rows)), sharex=True, layout="constrained"
    )
    for rank, (ax, notes) in enumerate(zip(axes, ranks, strict=True)):
        _compute(ax, notes, rank_colour(rank))
        _gradients(ax, notes)
        _all_reduces(ax, notes)
        names = [
            f"bucket {row}: layers {', '.join(map(str, which[::-1]))}" for row, (which, *_) in enumerate(buckets(notes))
        ]
        ax.set(ylim=(rows + 1.6, -0.6), yticks=[0, 1, *(2.1 + row for row in range(rows))])
        ax.set_yticklabels(["compute", "gradient of layer", *names])
        ax.set_title(
            f"rank {rank}: {behind_backward(notes):.0%} of the all-reduce time before its last gradient", loc="left"
        )
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1].set(xlabel="time since the start of the step [ms]", xlim=(0, None))
    waits = plt.Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=INK, hatch="////", linewidth=0.5)
    sent = plt.Rectangle((0, 0), 1, 1, color=INK, alpha=0.75)
    names = ["all-reduce of a bucket", "backward waits for it"]
    axes[0].legend([sent, waits], names, loc="lower left", fontsize=10)
    early = sum(start < at(ranks[0], "gradient ready") for _, start, _ in buckets(ranks[0]))
    finding = f"{early} of {rows} all-reduces start while backward still computes"
    figure.suptitle(finding, x=0.01, ha="left", fontsize=14, weight="bold")
    caption(figure, f"one step, measured on {len(ranks)} ranks: {where}")
    return described(
        figure,
        f"One measured step on {len(ranks)} ranks, as lanes: forward, backward, step; below, when the gradients of "
        f"each layer were ready, from the last layer to the first; below, {rows} all-reduces, one for each bucket. On "
        f"rank 0, {early} of them start before the last gradient is ready, so communication runs during backward.",
    )


def _compute(ax: Axes, notes: Sequence[Note], colour: str) -> None:
    """Forward, backward, and step; within backward, the wait for what is not averaged yet."""
    marks = [at(notes, f"{name} starts") for name in ("forward", "backward", "step")] + [at(notes, "step ends")]
    for begin, end, alpha in zip(marks, marks[1:], (0.3, 0.6, 0.9), strict=False):
        ax.barh(0, end - begin, 0.75, begin, color=colour, alpha=alpha, edgecolor="white", linewidth=1.5)
    ax.text(sum(marks[:2]) / 2, 0, "forward", ha="center", va="center")
    ax.text(marks[3], 0, " step", va="center")
    last = at(notes, "gradient ready")
    ax.text((marks[1] + last) / 2, 0, "backward", ha="center", va="center")
    ax.barh(0, marks[2] - last, 0.75, last, color="none", edgecolor=INK, hatch="////", linewidth=0)


def _gradients(ax: Axes, notes: Sequence[Note]) -> None:
    """A tick and a number where all gradients of a layer are ready."""
    for layer in sorted({which[0] for what, which, _ in notes if what == "gradient ready"}):
        ms = at(notes, "gradient ready", [layer])
        ax.plot([ms, ms], [0.55, 0.8], color=INK, linewidth=1.6)
        ax.text(ms, 1.1, str(layer), ha="center", va="center", fontsize=10)


def _all_reduces(ax: Axes, notes: Sequence[Note]) -> None:
    """A bar for each bucket's all-reduce, each on a row of its own, since they can overlap."""
    for row, (_, start, end) in enumerate(buckets(notes)):
        ax.barh(2.1 + row, end - start, 0.7, start, color=INK, alpha=0.75)


def ddp_buckets(layers: int = 6, per_bucket: int = 2, layer_ms: float = 2, all_reduce_ms: float = 3) -> Picture:
    """Draw how DDP overlaps communication: a bucket's all-reduce runs while earlier layers still compute."""
    order = list(range(layers, 0, -1))  # backward goes from the last layer to the first
    buckets = [order[start : start + per_bucket] for start in range(0, layers, per_bucket)]
    full = [layer_ms * (layers - bucket[-1] + 1) for bucket in buckets]
    slow = full[-1] + all_reduce_ms * len(buckets) + layer_ms
    sizes = (layer_ms, all_reduce_ms, 7.4 / slow)
    ax = canvas(5.65, "")
    fast = _timeline(ax, 0.55, "DDP: each bucket as soon as it is full", buckets, full, sizes)
    _timeline(ax, 2.75, "Without overlap: all of them after backward", buckets, [full[-1]] * len(buckets), sizes)
    write(
        ax,
        LEFT,
        0.25,
        f"Overlap makes this step {fast:g} ms long instead of {slow:g}",
        size=14,
        weight="bold",
        ha="left",
    )
    _axis(ax, 4.95, slow, sizes[2])
    made_up = f"A sketch: its times are made up, {layer_ms:g} ms a layer and {all_reduce_ms:g} ms an all-reduce."
    write(ax, LEFT, 5.4, made_up, ha="left", color=GREY, **SMALL)
    return described(
        ax.figure,
        f"Backward through {layers} layers, {layer_ms:g} ms each, gradients in {len(buckets)} buckets, "
        f"{all_reduce_ms:g} ms an all-reduce. DDP starts a bucket's all-reduce while earlier layers still "
        f"compute, and takes {fast:g} ms; without overlap it takes {slow:g} ms.",
    )


def _axis(ax: Axes, y: float, end: float, scale: float) -> None:
    """The time axis below both schedules."""
    ax.plot([1.3, 1.3 + end * scale], [y, y], color=INK, linewidth=1.2)
    every = max(5, 5 * round(end / 25))
    for ms in range(0, int(end) + 1, every):
        ax.plot([1.3 + ms * scale] * 2, [y, y + 0.07], color=INK, linewidth=1.2)
        write(ax, 1.3 + ms * scale, y + 0.22, ms, **SMALL)
    write(ax, LEFT, y + 0.05, "time [ms]", ha="left")


def _timeline(ax: Axes, top: float, title: str, buckets: list[list[int]], starts: list[float], sizes: tuple) -> float:
    """Draw one schedule, whose all-reduces may start at the given times; give its total time."""
    layer_ms, all_reduce_ms, scale = sizes
    now = free = 0.0
    bar = partial(_bar, ax, top, scale)
    write(ax, LEFT, top + 0.15, title, ha="left", weight="bold")
    for lane, name in ((0.63, "compute"), (1.18, "gradients"), (1.83, "network")):
        write(ax, LEFT, top + lane, name, ha="left")
    for number, (layers, earliest) in enumerate(zip(buckets, starts, strict=True)):
        name, short = f"bucket {number}", str(number)
        bar(now, layer_ms * len(layers), 0.95, [f"{name} fills", name, short], fill=0, line="--")
        for layer in layers:
            bar(now, layer_ms, 0.4, [f"layer {layer}", str(layer)])
            now += layer_ms
        begin = max(free, earliest)
        free = begin + all_reduce_ms
        bar(begin, all_reduce_ms, 1.6, [f"all-reduce\n{name}", short], INK, fill=0.8, color="white")
        if math.isclose(begin, now):  # it starts the moment the bucket is full
            arrow(ax, (1.28 + now * scale, top + 1.42), (1.4 + now * scale, top + 1.6))
    bar(now, free - now, 0.4, ["waits"], fill=0, line=":")
    bar(free, layer_ms, 0.4, ["step"], INK)
    write(ax, 1.35 + (free + layer_ms) * scale, top + 0.63, f"{free + layer_ms:g} ms", ha="left", weight="bold")
    return free + layer_ms


def _bar(
    ax: Axes,
    top: float,
    scale: float,
    begin: float,
    duration: float,
    lane: float,
    texts: list[str],
    colour: str = GREY,
    **look,
) -> None:
    """A piece of work on the time axis, with the longest of the texts that fits into it."""
    corner, width = (1.3 + begin * scale, top + lane), duration * scale - 0.04
    box(ax, corner, (width, 0.46), fitting(width, *texts), colour, **SMALL, **look)


def memory_of_gradients(parameters_mb: float = 100) -> Picture:
    """Draw what gradient_as_bucket_view saves: the second copy of all gradients."""
    apart, together = ["gradients", "buckets: a second copy"], ["gradients, in the buckets"]
    ax = canvas(2.85, f"Views save one copy of the gradients: {3 * parameters_mb:g} MB become {2 * parameters_mb:g} MB")
    for y, view, blocks in ((0.92, False, ["parameters", *apart]), (1.92, True, ["parameters", *together])):
        write(ax, LEFT, y - 0.2, f"gradient_as_bucket_view={view}", ha="left", weight="bold", **CODE)
        for text, (left, width) in zip(blocks, pieces(LEFT, RIGHT, 3), strict=False):
            hatch = "///" if "copy" in text else ""
            box(ax, (left, y), (width, 0.42), f"{text}, {parameters_mb:g} MB", rank_colour(0), hatch=hatch, size=11)
    caption = "The memory of one rank, without activations and the optimizer's state."
    write(ax, LEFT, 2.65, caption, ha="left", color=GREY, **SMALL)
    return described(
        ax.figure,
        f"Memory of one rank: without gradient_as_bucket_view, {parameters_mb:g} MB of parameters, as much "
        f"of gradients and a copy of them in buckets, {3 * parameters_mb:g} MB in all; with it the gradients "
        f"live in the buckets, {2 * parameters_mb:g} MB in all.",
    )


def data_parallel_vs_ddp(gpus: int = 4) -> Picture:
    """Why not DataParallel: all its traffic passes through GPU 0, while DDP has no hub."""
    ax = canvas(4.65, "DataParallel sends all through GPU 0; DDP has no hub")
    write(ax, 2.35, 0.65, f"DataParallel: 1 process, {gpus} threads", weight="bold")
    box(ax, (LEFT, 0.85), (4.5, 2.9), fill=0.06)
    hub = box(ax, (1.7, 1.0), (1.3, 0.5), "GPU 0", rank_colour(0), weight="bold")
    for gpu, (left, width) in enumerate(pieces(0.25, 4.45, gpus - 1), start=1):
        wide = min(width, 1.1)
        corner = (left + (width - wide) / 2, 3.05)
        other = box(ax, corner, (wide, 0.5), f"GPU {gpu}", rank_colour(gpu), size=10)
        link(ax, hub, other, bend=0.12)
        link(ax, other, hub, bend=0.12, line="--")
    sent = "solid: a piece of the batch, a copy of the model\ndashed: outputs, gradients"
    write(ax, 2.35, 4.2, f"every step, all through GPU 0\n{sent}", **SMALL)
    _ring(ax, gpus)
    return described(
        ax.figure,
        f"DataParallel: one process with {gpus} threads; at every step GPU 0 sends a piece of the batch "
        f"and a copy of the model to each of the other {gpus - 1}, and takes back outputs and gradients. DDP:"
        f" {gpus} processes, one a GPU, pass gradients round a ring, with no hub.",
    )


def _ring(ax: Axes, gpus: int) -> None:
    """DDP: a process for each GPU, and gradients passed on from neighbour to neighbour."""
    write(ax, 7.15, 0.65, f"DDP: {gpus} processes, no hub", weight="bold")
    places: list[FancyBboxPatch] = []
    for gpu in range(gpus):
        angle = 2 * math.pi * gpu / gpus - math.pi / 2
        corner = (6.65 + 1.7 * math.cos(angle), 2.02 + 1.17 * math.sin(angle))
        places.append(box(ax, corner, (1.0, 0.56), f"rank {gpu}\nGPU {gpu}", rank_colour(gpu), size=10))
    for here, following in zip(places, places[1:] + places[:1], strict=True):
        link(ax, here, following, bend=-0.2)
    sent = "every step, round the ring\nall-reduce of the gradients,\nno copies of the model"
    write(ax, 7.15, 4.2, sent, **SMALL)
