"""Diagrams of DDP: buckets and overlap, the memory of gradients, and DataParallel beside it."""

import math
from functools import partial

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import (
    CODE,
    LEFT,
    RIGHT,
    SMALL,
    arrow,
    box,
    canvas,
    fitting,
    link,
    pieces,
    span,
    write,
)
from ddp_helpers.notebook.style import GREY, INK, rank_colour


def ddp_buckets(layers: int = 6, per_bucket: int = 2, layer_ms: float = 2, all_reduce_ms: float = 3) -> Picture:
    """How DDP hides communication: a bucket's all-reduce runs while earlier layers still compute."""
    order = list(range(layers, 0, -1))  # backward goes from the last layer to the first
    buckets = [order[start : start + per_bucket] for start in range(0, layers, per_bucket)]
    full = [layer_ms * (layers - bucket[-1] + 1) for bucket in buckets]
    slow = full[-1] + all_reduce_ms * len(buckets) + layer_ms
    sizes = (layer_ms, all_reduce_ms, 8.1 / slow)
    ax = canvas(5.9, "Backward pass on every rank: when are the gradients averaged?")
    fast = _timeline(ax, 0.55, "DDP: each bucket as soon as it is full", buckets, full, sizes)
    late = [full[-1]] * len(buckets)
    _timeline(ax, 3.25, "Without overlap: after the backward pass", buckets, late, sizes)
    return described(
        ax.figure,
        f"Backward through {layers} layers, {layer_ms:g} ms each, gradients in {len(buckets)} buckets, "
        f"{all_reduce_ms:g} ms an all-reduce. DDP starts a bucket's all-reduce while earlier layers still "
        f"compute, and takes {fast:g} ms; without overlap it takes {slow:g} ms.",
    )


def _timeline(ax: Axes, top: float, title: str, buckets: list[list[int]], starts: list[float], sizes: tuple) -> float:
    """Draw one schedule, whose all-reduces may start at the given times; give its total time."""
    layer_ms, all_reduce_ms, scale = sizes
    now = free = 0.0
    bar = partial(_bar, ax, top, scale)
    _lanes(ax, top, title)
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
    span(ax, 1.3, 1.3 + (free + layer_ms) * scale, top + 2.28, f"{free + layer_ms:g} ms")
    return free + layer_ms


def _lanes(ax: Axes, top: float, title: str) -> None:
    """The names of a schedule and of its lanes."""
    write(ax, LEFT, top + 0.15, title, ha="left", weight="bold")
    for lane, name in ((0.63, "compute"), (1.18, "gradients"), (1.83, "network"), (2.28, "time")):
        write(ax, LEFT, top + lane, name, ha="left")


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
    """What gradient_as_bucket_view saves: the second copy of all gradients."""
    apart, together = ["gradients", "buckets: a second copy"], ["gradients, in the buckets"]
    ax = canvas(3.95, "GPU memory of one rank, here rank 0")
    for y, view, blocks in ((1.0, False, ["parameters", *apart]), (2.65, True, ["parameters", *together])):
        write(ax, LEFT, y - 0.22, f"gradient_as_bucket_view={view}", ha="left", weight="bold", **CODE)
        for text, (left, width) in zip(blocks, pieces(LEFT, RIGHT, 3), strict=False):
            hatch = "///" if "copy" in text else ""
            box(ax, (left, y), (width, 0.65), f"{text}\n{parameters_mb:g} MB", rank_colour(0), hatch=hatch)
        span(ax, LEFT, left + width, y + 0.82, f"{len(blocks) * parameters_mb:g} MB")
    return described(
        ax.figure,
        f"Memory of one rank: without gradient_as_bucket_view, {parameters_mb:g} MB of parameters, as much "
        f"of gradients and a copy of them in buckets, {3 * parameters_mb:g} MB in all; with it the gradients "
        f"live in the buckets, {2 * parameters_mb:g} MB in all.",
    )


def data_parallel_vs_ddp(gpus: int = 4) -> Picture:
    """Why not DataParallel: all its traffic passes through GPU 0, while DDP has no hub."""
    ax = canvas(4.65, f"The same {gpus} GPUs, two ways to share the work")
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
