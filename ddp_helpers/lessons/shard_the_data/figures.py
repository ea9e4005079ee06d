"""The figures of notebook 04: shards, and where one sample goes in each epoch.

The notebook calls them, in its own process; they draw from their arguments alone.
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
    write_text,
)
from ddp_helpers.draw.style import GREY, LEFT, RIGHT, SMALL, rank_colour

# ---- shards

_ORDER_LEFT = 1.35  # inches: where the samples begin, right of the names of the rows


def picture_of_shards(samples: int, world_size: int, seed: int) -> Picture:
    """Draw the order of epoch 0, the samples of each rank, and those that are dealt twice.

    seed: of the order, as DistributedSampler takes it.
    """
    shards = [_shard(samples, world_size, rank, seed) for rank in range(world_size)]
    dealt = [shard[place] for place in range(len(shards[0])) for shard in shards]
    title = f"{samples} samples for {world_size} ranks: each gets {len(shards[0])}"
    if repeated := len(dealt) - samples:
        title += f", and {repeated} {'is' if repeated == 1 else 'are'} repeated"
    ax = canvas(1.7 + 0.5 * world_size, title)
    pitch = min(0.62, 6.95 / len(dealt))
    write_text(ax, LEFT, 1.05, "this epoch's\norder", ha="left")
    for place, sample in enumerate(dealt):
        rank, x = place % world_size, _ORDER_LEFT + place * pitch
        for y, height in ((0.83, 0.44), (1.6 + 0.5 * rank, 0.4)):
            hatch = "///" if place >= samples else ""
            box(ax, (x, y), (pitch * 0.9, height), sample, rank_colour(rank), hatch=hatch)
    if repeated:
        middle = (len(dealt) + samples) / 2 - 0.05
        write_text(ax, _ORDER_LEFT + pitch * middle, 0.65, "repeated", style="italic")
    for rank, shard in enumerate(shards):
        y = 1.8 + 0.5 * rank
        write_text(ax, LEFT, y, f"rank {rank}", ha="left", weight="bold")
        write_text(ax, RIGHT, y, f"{len(shard)} samples", ha="right")
    texts = [f"rank {rank} gets {', '.join(map(str, shard))}" for rank, shard in enumerate(shards)]
    return described(ax.figure, f"{title}: {'; '.join(texts)}.")


def _shard(samples: int, world_size: int, rank: int, seed: int) -> list[int]:
    """List the samples of one rank in epoch 0."""
    sampler: DistributedSampler[int] = DistributedSampler(
        range(samples),  # type: ignore[arg-type]  # it has a length, and that is all it needs
        world_size,
        rank,
        seed=seed,
    )
    return list(sampler)


# ---- one sample through the epochs

Shards = Sequence[Sequence[int]]  # of one epoch: samples, by rank and position
_FOLLOWED = 0.85  # the share of its colour in the box of the sample that is followed


def _rank_of(sample: int, shards: Shards) -> int:
    """Return the rank that has a sample in an epoch."""
    return next(rank for rank, shard in enumerate(shards) if sample in shard)


def sample_by_epoch(forgotten: Sequence[Shards], called: Sequence[Shards], sample: int) -> Picture:
    """Draw the shards of each epoch, if set_epoch is forgotten and if it is called.

    Both have the shards of each epoch; a line joins the boxes of one sample.
    """
    stays = {_rank_of(sample, shards) for shards in forgotten}
    ranks = [_rank_of(sample, shards) for shards in called]
    title = f"Sample {sample} stays on rank {min(stays)} if set_epoch is forgotten"
    title += f"; if it is called, {len(set(ranks))} ranks see it"
    ax = canvas(1.55 + 0.42 * len(called), title)
    for epoch in range(len(called)):
        write_text(ax, LEFT, 1.5 + 0.42 * epoch, f"epoch {epoch}", ha="left")
    (left, width), (right, _) = equal_parts(0.95, RIGHT, 2, gap=0.35)
    _draw_epochs(ax, left, width, "set_epoch forgotten: one order for ever", forgotten, sample)
    _draw_epochs(ax, right, width, "set_epoch called: a new order each epoch", called, sample)
    visited = ", ".join(map(str, ranks))
    return described(ax.figure, f"{title}: rank {visited} in epochs 0 to {len(called) - 1}.")


def _draw_epochs(
    ax: Axes,
    left: float,
    width: float,
    name: str,
    epochs: Sequence[Shards],
    followed: int,
) -> None:
    """Draw a row for each epoch: the samples of rank 0, those of rank 1, and so on."""
    write_text(ax, left, 0.72, name, weight="bold", ha="left")
    parts = equal_parts(left, left + width, len(epochs[0]), gap=0.1)
    for rank, (x, extent) in enumerate(parts):
        write_text(ax, x + extent / 2, 1.08, f"rank {rank}", color=GREY, **SMALL)
    way = []
    for epoch, shards in enumerate(epochs):
        y = 1.3 + 0.42 * epoch
        for rank, shard in enumerate(shards):
            for sample, (x, extent) in zip(
                shard, equal_parts(*_edges(parts[rank]), len(shard), gap=0.03), strict=True
            ):
                _sample_box(ax, (x, y), (extent, 0.34), sample, rank, sample == followed)
                if sample == followed:
                    way.append((x + extent / 2, y))
    for (x, y), below in pairwise(way):
        arrow(ax, (x, y + 0.34), below, mutation_scale=8, linewidth=1.4)


def _edges(part: tuple[float, float]) -> tuple[float, float]:
    """Return the left and the right edge of a part that is given as left edge and width."""
    return part[0], part[0] + part[1]


def _sample_box(
    ax: Axes,
    corner: tuple[float, float],
    extent: tuple[float, float],
    sample: int,
    rank: int,
    followed: bool,
) -> None:
    """Draw the box of a sample in the colour of its rank, full if it is the one followed."""
    fill = _FOLLOWED if followed else 0.2
    weight = "bold" if followed else "normal"
    box(ax, corner, extent, sample, rank_colour(rank), fill=fill, weight=weight, **SMALL)
