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


def picture_of_shards(samples: int, world_size: int, drop_last: bool = False) -> Picture:
    """Draw the samples of each rank, and those that are repeated or dropped to make shards equal.

    drop_last: as DistributedSampler takes it.
    """
    shards = [_shard(samples, world_size, rank, drop_last) for rank in range(world_size)]
    in_shards = len(shards[0]) * world_size
    fate, fate_text = "", ""
    if uneven := abs(in_shards - samples):
        fate = "repeated" if in_shards > samples else "dropped"
        fate_text = f", and {uneven} {'is' if uneven == 1 else 'are'} {fate}"
    title = f"{samples} samples for {world_size} ranks: each gets {len(shards[0])}{fate_text}"
    title += f" (drop_last={drop_last})"
    ax = canvas(1.7 + 0.5 * world_size, title)
    pitch = min(0.62, 6.95 / max(in_shards, samples))
    _draw_order(ax, samples, world_size, in_shards, pitch)
    for rank, shard in enumerate(shards):
        y = 1.8 + 0.5 * rank
        write_text(ax, LEFT, y, f"rank {rank}", ha="left", weight="bold")
        write_text(ax, RIGHT, y, f"{len(shard)} samples", ha="right")
    middle_of_uneven = (in_shards + samples) / 2 - 0.05
    write_text(ax, _ORDER_LEFT + pitch * middle_of_uneven, 0.65, fate, style="italic")
    texts = [f"rank {rank} gets {', '.join(map(str, shard))}" for rank, shard in enumerate(shards)]
    return described(ax.figure, f"{title}: {'; '.join(texts)}.")


def _shard(samples: int, world_size: int, rank: int, drop_last: bool) -> list[int]:
    """List the samples of one rank, not shuffled."""
    sampler: DistributedSampler[int] = DistributedSampler(
        range(samples),  # type: ignore[arg-type]  # it has a length, and that is all it needs
        world_size,
        rank,
        shuffle=False,
        drop_last=drop_last,
    )
    return list(sampler)


def _draw_order(ax: Axes, samples: int, world_size: int, in_shards: int, pitch: float) -> None:
    """Draw the epoch's order, and each rank's samples below it.

    in_shards: the samples of all shards, fewer where some are dropped, more where some are
    repeated; pitch: inches from sample to sample.
    """
    write_text(ax, LEFT, 1.05, "this epoch's\norder", ha="left")
    for index in range(max(in_shards, samples)):
        rank, sample = index % world_size, index % samples
        x, width = _ORDER_LEFT + index * pitch, pitch * 0.9
        in_order = (x, 0.83), (width, 0.44)
        if index < in_shards:
            colour = rank_colour(rank)
            hatch = "///" if index >= samples else ""
            in_shard = (x, 1.6 + 0.5 * rank), (width, 0.4)
            box(ax, *in_shard, sample, colour, hatch=hatch)
            box(ax, *in_order, sample, colour, hatch=hatch)
        else:
            box(ax, *in_order, sample, line=":", fill=0.05, color=GREY)


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


def steps_of_a_sample(
    forgotten: Sequence[Shards],
    called: Sequence[Shards],
    sample: int,
    seed: int,
) -> list[Picture]:
    """Draw each epoch: its order, dealt to the ranks, and where the sample has been so far.

    Both have the shards of each epoch, if set_epoch is forgotten and if it is called.
    """
    return [
        _dealt(forgotten[: epoch + 1], called[: epoch + 1], sample, seed, len(called))
        for epoch in range(len(called))
    ]


def _dealt(
    forgotten: Sequence[Shards],
    called: Sequence[Shards],
    followed: int,
    seed: int,
    epochs: int,
) -> Picture:
    """Draw the order of the last epoch given, the shards below it, and the ranks of one sample."""
    epoch, shards = len(called) - 1, called[-1]
    world_size, each = len(shards), len(shards[0])
    title = f"Epoch {epoch}: the order from seed {seed} + epoch {epoch} gives sample {followed}"
    title += f" to rank {_rank_of(followed, shards)}"
    ax = canvas(2.9 + 0.5 * world_size, title)
    write_text(ax, LEFT, 1.05, "this epoch's\norder", ha="left")
    pitch = (RIGHT - _ORDER_LEFT) / (each * world_size)
    for rank, shard in enumerate(shards):
        y = 1.6 + 0.5 * rank
        write_text(ax, LEFT, y + 0.2, f"rank {rank}", ha="left", weight="bold")
        for position, sample in enumerate(shard):
            x = _ORDER_LEFT + (position * world_size + rank) * pitch
            for corner, height in (((x, 0.83), 0.44), ((x, y), 0.4)):
                _sample_box(ax, corner, (pitch * 0.9, height), sample, rank, sample == followed)
            if sample == followed:
                middle = x + pitch * 0.45
                arrow(ax, (middle, 1.27), (middle, y))
    foot = 1.85 + 0.5 * world_size
    write_text(ax, LEFT, foot, f"The rank of sample {followed} so far:", ha="left", color=GREY)
    names = "set_epoch called", "set_epoch forgotten"
    for row, (name, history) in enumerate(zip(names, (called, forgotten), strict=True)):
        y = foot + 0.2 + 0.38 * row
        write_text(ax, LEFT, y + 0.16, name, ha="left")
        for past, (x, width) in enumerate(equal_parts(2.1, RIGHT, epochs)):
            if past <= epoch:
                rank = _rank_of(followed, history[past])
                text = f"epoch {past}: rank {rank}"
                box(ax, (x, y), (width, 0.32), text, rank_colour(rank), **SMALL)
    return described(ax.figure, f"{title}.")
