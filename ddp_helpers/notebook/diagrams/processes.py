"""Who runs what: processes, nodes, devices."""

import math

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import (
    LEFT,
    MINUS,
    RIGHT,
    SMALL,
    TIMES,
    arrow,
    box,
    canvas,
    link,
    pieces,
    write,
)
from ddp_helpers.notebook.style import GREY, INK, rank_colour


def spmd(world_size: int = 4) -> Picture:
    """One script, many processes: what differs between the ranks, and what all-reduce makes equal again."""
    gradients = [2 * rank + 1 for rank in range(world_size)]
    mean, weight, rate = sum(gradients) / world_size, 10, 0.5
    after, terms = weight - rate * mean, " + ".join(map(str, gradients))
    ax = canvas(6.35, "One program, many processes: different data, the same weights")
    box(ax, (2.3, 0.5), (7.1, 0.42), f"one script, started {world_size} times")
    for rank, (left, width) in enumerate(pieces(2.3, RIGHT, world_size)):
        arrow(ax, (left + width / 2, 0.95), (left + width / 2, 1.25))
        box(ax, (left, 1.27), (width, 4.95), colour=rank_colour(rank), fill=0.04)
        write(ax, left + width / 2, 1.5, f"rank {rank}", weight="bold")
        arrow(ax, (left + width / 2, 3.72), (left + width / 2, 3.99))
    _row(ax, 1.75, "data", [f"shard {rank}" for rank in range(world_size)], own=True)
    _row(ax, 2.5, "forward, backward", [f"w = {weight}"] * world_size)
    _row(ax, 3.25, "gradient", [f"g = {gradient}" for gradient in gradients], own=True)
    _row(ax, 4.75, "averaged gradient", [f"g = {mean:g}"] * world_size)
    _row(ax, 5.5, f"step: w {MINUS} {rate} {TIMES} g", [f"w = {after:g}"] * world_size)
    box(ax, (2.2, 4.0), (7.25, 0.46), f"all-reduce:  ({terms}) / {world_size} = {mean:g}", INK, fill=0.12)
    return described(
        ax.figure,
        f"One script runs as {world_size} processes, each with its own shard of the data. All-reduce turns "
        f"their gradients into one mean, ({terms}) / {world_size} = {mean:g}, so that all replicas of the "
        f"model take the same step, from weight {weight} to {after:g}.",
    )


def _row(ax: Axes, y: float, label: str, texts: list[str], own: bool = False) -> None:
    """One stage of every rank's work: in the rank's colour where it is its own, grey where all agree."""
    write(ax, LEFT, y + 0.12, label, ha="left", weight="bold")
    write(ax, LEFT, y + 0.36, "each rank its own" if own else "the same on all ranks", ha="left", **SMALL)
    for rank, (left, width) in enumerate(pieces(2.3, RIGHT, len(texts))):
        colour, font = rank_colour(rank) if own else GREY, 11.5 if width > 1 else 10
        box(ax, (left + 0.06, y), (width - 0.12, 0.46), texts[rank], colour, size=font)
        if label != "data":  # the first row has nothing above it to come from
            arrow(ax, (left + width / 2, y - 0.29), (left + width / 2, y), shrinkA=1, shrinkB=1)


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
