"""The figures of notebook 04: shards, and where one sample goes in each epoch.

The notebook calls them, in the driver process; they draw from their arguments alone.
"""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from torch.utils.data import DistributedSampler

from ddp_helpers.draw.drawing import (
    Picture,
    arrow,
    box,
    canvas,
    described,
    equal_parts,
    write_left,
    write_text,
)
from ddp_helpers.draw.style import GREY, RIGHT, SMALL, rank_colour

# ---- shards


def picture_of_shards(samples: int, world_size: int, seed: int) -> Picture:
    """Draw the order of epoch 0, the samples of each rank, and those that are assigned twice.

    seed: of the order, as DistributedSampler takes it.
    """
    shards: list[list[int]] = []
    for rank in range(world_size):
        # A range has a length, which is all that the sampler needs.
        shards.append([*DistributedSampler(range(samples), world_size, rank, seed=seed)])  # type: ignore[arg-type]
    share = len(shards[0])
    title = f"{samples} samples for {world_size} ranks: each gets {share}"
    if repeated := share * world_size - samples:
        title += f", and {repeated} {'is' if repeated == 1 else 'are'} repeated"
    ax = canvas(1.7 + 0.5 * world_size, title)
    pitch = min(0.62, 6.95 / (share * world_size))
    write_left(ax, 1.05, "this epoch's\norder")
    if repeated:
        middle = 1.3 + pitch * (samples + repeated / 2)
        write_text(ax, middle, 0.65, "repeated", style="italic")
    for rank, shard in enumerate(shards):
        write_left(ax, 1.8 + 0.5 * rank, f"rank {rank}", weight="bold")
        write_text(ax, RIGHT, 1.8 + 0.5 * rank, f"{share} samples", ha="right")
        for number, sample in enumerate(shard):
            place = rank + number * world_size
            hatch = "///" if place >= samples else ""
            for y, height in ((0.83, 0.44), (1.6 + 0.5 * rank, 0.4)):
                corner, extent = (1.35 + place * pitch, y), (pitch * 0.9, height)
                box(ax, corner, extent, sample, rank_colour(rank), hatch=hatch)
    texts = [f"rank {rank} gets {', '.join(map(str, shard))}" for rank, shard in enumerate(shards)]
    return described(ax.figure, f"{title}: {'; '.join(texts)}.")


# ---- one sample through the epochs

Shards = Sequence[Sequence[int]]  # of one epoch: samples, by rank and position


def sample_by_epoch(forgotten: Sequence[Shards], called: Sequence[Shards], sample: int) -> Picture:
    """Draw the shards of each epoch, if set_epoch is forgotten and if it is called.

    Both have the shards of each epoch; a line joins the boxes of one sample.
    """
    (home, *_), ranks = (
        [rank for shards in epochs for rank, shard in enumerate(shards) if sample in shard]
        for epochs in (forgotten, called)
    )
    title = f"Sample {sample} stays on rank {home} if set_epoch is forgotten"
    title += f"; if it is called, {len(set(ranks))} ranks see it"
    ax = canvas(1.55 + 0.42 * len(called), title)
    for epoch in range(len(called)):
        write_left(ax, 1.5 + 0.42 * epoch, f"epoch {epoch}")
    _draw_epochs(ax, 0.95, "set_epoch forgotten: always the same order", forgotten, sample)
    _draw_epochs(ax, 5.35, "set_epoch called: a new order each epoch", called, sample)
    visited = ", ".join(map(str, ranks))
    return described(ax.figure, f"{title}: rank {visited} in epochs 0 to {len(called) - 1}.")


def _draw_epochs(ax: Axes, left: float, name: str, epochs: Sequence[Shards], followed: int) -> None:
    """Draw a row for each epoch: the samples of rank 0, then of rank 1, and so on."""
    write_text(ax, left, 0.72, name, weight="bold", ha="left")
    parts = equal_parts(left, left + 4.05, len(epochs[0]), gap=0.1)
    for rank, (start, width) in enumerate(parts):
        write_text(ax, start + width / 2, 1.08, f"rank {rank}", color=GREY, **SMALL)
    way: list[tuple[float, float]] = []
    for epoch, shards in enumerate(epochs):
        y = 1.3 + 0.42 * epoch
        for rank, (shard, (start, width)) in enumerate(zip(shards, parts, strict=True)):
            boxes = equal_parts(start, start + width, len(shard), gap=0.03)
            for sample, (x, extent) in zip(shard, boxes, strict=True):
                look = {"fill": 0.85, "weight": "bold"} if sample == followed else {"fill": 0.2}
                box(ax, (x, y), (extent, 0.34), sample, rank_colour(rank), **look, **SMALL)
                if sample == followed:
                    way.append((x + extent / 2, y))
    for (x, y), below in pairwise(way):
        arrow(ax, (x, y + 0.34), below, mutation_scale=8, linewidth=1.4)
