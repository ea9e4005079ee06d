"""Who gets which samples."""

import math

from matplotlib.axes import Axes

from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import (
    LEFT,
    RIGHT,
    TIMES,
    box,
    canvas,
    pieces,
    span,
    write,
)
from ddp_helpers.notebook.style import GREY, rank_colour


def shard_indices(order: list[int], world_size: int, drop_last: bool = False) -> list[list[int]]:
    """The samples that DistributedSampler gives each rank, as many to one as to another."""
    each = len(order) // world_size if drop_last else math.ceil(len(order) / world_size)
    total = each * world_size
    padded = order * math.ceil(total / len(order))  # repeats from the front; what is too much is cut off next
    return [padded[:total][rank::world_size] for rank in range(world_size)]


def shards(samples: int = 10, world_size: int = 4, drop_last: bool = False, order: list[int] | None = None) -> Picture:
    """Which samples each rank gets, and which are repeated or dropped to make the shares equal."""
    order = list(range(samples)) if order is None else order
    parts = shard_indices(order, world_size, drop_last)
    dealt, given = len(parts[0]) * world_size, len(order)
    ax = canvas(1.7 + 0.5 * world_size, f"{given} samples for {world_size} ranks, drop_last={drop_last}")
    pitch = min(0.62, 6.95 / max(dealt, given))
    _deal(ax, order, world_size, dealt, pitch)
    for rank, part in enumerate(parts):
        write(ax, LEFT, 1.8 + 0.5 * rank, f"rank {rank}", ha="left", weight="bold")
        write(ax, RIGHT, 1.8 + 0.5 * rank, f"{len(part)} samples", ha="right")
    fate = "repeated" if dealt > given else "dropped" if dealt < given else ""
    write(ax, 1.35 + pitch * ((dealt + given) / 2 - 0.05), 0.65, fate, style="italic")
    shares = "; ".join(f"rank {rank} gets {', '.join(map(str, part))}" for rank, part in enumerate(parts))
    last = f" {abs(dealt - given)} {fate}." if fate else ""
    heading = f"{given} samples dealt to {world_size} ranks, drop_last={drop_last}"
    return described(ax.figure, f"{heading}: {shares}.{last}")


def _deal(ax: Axes, order: list[int], world_size: int, dealt: int, pitch: float) -> None:
    """The epoch's order, with what is repeated or dropped at its end, and each rank's samples below it."""
    write(ax, LEFT, 1.05, "this epoch's\norder", ha="left")
    for place in range(max(dealt, len(order))):
        rank, x, sample = place % world_size, 1.35 + place * pitch, order[place % len(order)]
        if place < dealt:
            look = {"colour": rank_colour(rank), "hatch": "///" if place >= len(order) else ""}
            box(ax, (x, 1.6 + 0.5 * rank), (pitch * 0.9, 0.4), sample, **look)
        else:
            look = {"line": ":", "fill": 0.05, "color": GREY}
        box(ax, (x, 0.83), (pitch * 0.9, 0.44), sample, **look)


def global_batch(per_rank: int = 64, world_size: int = 4) -> Picture:
    """One optimizer step sees world_size batches side by side: together they are the global batch."""
    total = per_rank * world_size
    ax = canvas(3.75, "One optimizer step sees the batches of all ranks")
    for rank, (left, width) in enumerate(pieces(LEFT, RIGHT, world_size)):
        box(ax, (left, 0.55), (width, 2.4), colour=rank_colour(rank), fill=0.08)
        write(ax, left + width / 2, 0.77, f"rank {rank}", weight="bold")
        across = min(width * 0.85, 1.5)
        columns = math.ceil(math.sqrt(per_rank * across / 1.5))
        rows = math.ceil(per_rank / columns)
        step = min(across / columns, 1.5 / rows)
        dots = [divmod(sample, columns) for sample in range(per_rank)]
        x = [left + width / 2 + (column - columns / 2 + 0.5) * step for _, column in dots]
        y = [1.72 + (row - rows / 2 + 0.5) * step for row, _ in dots]
        ax.scatter(x, y, s=(step * 45) ** 2, color=rank_colour(rank), linewidths=0)
        write(ax, left + width / 2, 2.72, f"{per_rank} samples", size=11.5 if width > 1.2 else 10)
    product = f"{world_size} ranks {TIMES} {per_rank} samples = a global batch of {total} samples"
    span(ax, LEFT, RIGHT, 3.2, product, size=13)
    return described(
        ax.figure,
        f"{world_size} ranks with {per_rank} samples each, side by side: one optimizer step averages the "
        f"gradients of a global batch of {world_size} {TIMES} {per_rank} = {total} samples.",
    )
