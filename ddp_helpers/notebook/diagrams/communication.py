"""What passes between ranks, and when."""

import math
from functools import partial

from matplotlib.axes import Axes

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
    pieces,
    span,
    write,
)
from ddp_helpers.notebook.style import GREY, INK, rank_colour


def collectives(world_size: int = 4) -> Picture:
    """What each collective leaves on every rank, before and after, in numbers."""
    panels, sums = _exchanges(world_size)
    across, height = 2 if world_size <= 4 else 1, 0.95 + 0.4 * world_size
    ax = canvas(0.7 + height * 4 / across, f"Four collectives on {world_size} ranks: before → after")
    for number, (name, (effect, before, after)) in enumerate(panels.items()):
        left, width = pieces(LEFT, RIGHT, across, gap=0.4)[number % across]
        top, middle = 0.5 + height * (number // across), left + 0.32 + width / 2
        write(ax, left, top + 0.2, name, ha="left", weight="bold", family="monospace")
        write(ax, left, top + 0.46, effect, ha="left")
        for rank in range(world_size):
            y = top + 0.85 + 0.4 * rank
            write(ax, left, y, f"rank {rank}", ha="left", **SMALL)
            _cells(ax, left + 0.65, middle - 0.2, y, before[rank])
            arrow(ax, (middle - 0.15, y), (middle + 0.15, y))
            _cells(ax, middle + 0.2, left + width, y, after[rank])
    key = "Colour: the rank that held the number. Grey: a sum over all ranks. Dotted: empty."
    write(ax, LEFT, 0.5 + height * 4 / across, key, ha="left", **SMALL)
    return described(
        ax.figure,
        f"Before and after on {world_size} ranks: broadcast copies rank 0's numbers to all, all_reduce "
        f"leaves the sums {sums} on every rank, reduce_scatter leaves one of these sums on each, and "
        "all_gather puts every rank's part on all.",
    )


def _exchanges(world_size: int) -> tuple[dict[str, tuple], str]:
    """For each collective its effect and all ranks' cells, (number, rank it came from), before and after."""
    ranks = range(world_size)
    own = [[((rank + 1) * (place + 1), rank) for place in ranks] for rank in ranks]
    sums = [sum(number for number, _ in column) for column in zip(*own, strict=True)]
    summed, held = [(number, None) for number in sums], list(zip(sums, ranks, strict=True))

    def scattered(cells: list[tuple]) -> list[list]:
        return [[cells[place] if place == rank else None for place in ranks] for rank in ranks]

    return {
        "broadcast": ("every rank gets rank 0's numbers", own, [own[0]] * world_size),
        "all_reduce": ("every rank gets every sum", own, [summed] * world_size),
        "reduce_scatter": ("each rank gets the sum of one part", own, scattered(summed)),
        "all_gather": ("every rank gets every rank's part", scattered(held), [held] * world_size),
    }, ", ".join(map(str, sums))


def _cells(ax: Axes, left: float, right: float, y: float, cells: list[tuple | None]) -> None:
    """One rank's numbers in a row."""
    for cell, (x, width) in zip(cells, pieces(left, right, len(cells), gap=0.04), strict=True):
        number, owner = cell or ("", None)
        look = {"fill": 0.25, "line": "-"} if cell else {"fill": 0.03, "line": ":"}
        colour = GREY if owner is None else rank_colour(owner)
        box(ax, (x, y - 0.17), (width, 0.34), number, colour, **look, **SMALL)


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
