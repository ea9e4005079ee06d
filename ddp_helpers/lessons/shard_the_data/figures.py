"""Figures of notebook 04: shards, who has a sample in each epoch, the global batch, large batches."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.notebook.drawing import (
    BLUE,
    GREY,
    INK,
    LEFT,
    RIGHT,
    SMALL,
    TIMES,
    Picture,
    box,
    canvas,
    described,
    pieces,
    rank_colour,
    span,
    tint,
    write,
)

Deals = Sequence[Sequence[Sequence[int]]]  # samples, by epoch, rank and position


def shard_indices(order: list[int], world_size: int, drop_last: bool = False) -> list[list[int]]:
    """The samples that DistributedSampler gives each rank, as many to one as to another."""
    each = len(order) // world_size if drop_last else math.ceil(len(order) / world_size)
    total = each * world_size
    padded = order * math.ceil(total / len(order))  # repeats from the front; what is too much is cut off next
    return [padded[:total][rank::world_size] for rank in range(world_size)]


def picture_of_shards(
    samples: int = 10, world_size: int = 4, drop_last: bool = False, order: list[int] | None = None
) -> Picture:
    """Draw the samples of each rank, and those that are repeated or dropped to make the shards equal."""
    order = list(range(samples)) if order is None else order
    parts = shard_indices(order, world_size, drop_last)
    dealt, given = len(parts[0]) * world_size, len(order)
    fate = "repeated" if dealt > given else "dropped" if dealt < given else ""
    ends = f", and {abs(dealt - given)} {'is' if abs(dealt - given) == 1 else 'are'} {fate}" if fate else ""
    title = f"{given} samples for {world_size} ranks: each gets {len(parts[0])}{ends} (drop_last={drop_last})"
    ax = canvas(1.7 + 0.5 * world_size, title)
    pitch = min(0.62, 6.95 / max(dealt, given))
    _deal(ax, order, world_size, dealt, pitch)
    for rank, part in enumerate(parts):
        write(ax, LEFT, 1.8 + 0.5 * rank, f"rank {rank}", ha="left", weight="bold")
        write(ax, RIGHT, 1.8 + 0.5 * rank, f"{len(part)} samples", ha="right")
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


def owners(shards: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """The rank and the position in its shard of each sample."""
    return {sample: (rank, place) for rank, shard in enumerate(shards) for place, sample in enumerate(shard)}


def deals_by_epoch(forgotten: Deals, told: Deals) -> Picture:
    """Draw which rank has each sample in each epoch, without set_epoch and with it."""
    samples, world_size = sum(map(len, told[0])), len(told[0])
    moved = [
        sum(len({owners(shards)[sample][0] for shards in epochs}) > 1 for sample in range(samples))
        for epochs in (forgotten, told)
    ]
    title = f"Without set_epoch {moved[0]} of {samples} samples ever change their rank; with it {moved[1]} do"
    ax = canvas(1.75 + 0.4 * len(told), title)
    for (left, width), name, epochs in zip(
        pieces(0.95, RIGHT, 2, gap=0.3), ("set_epoch forgotten", "set_epoch called"), (forgotten, told), strict=True
    ):
        write(ax, left, 0.7, name, weight="bold", ha="left")
        for epoch, shards in enumerate(epochs):
            for sample, (rank, place) in owners(shards).items():
                corner = (left + sample * width / samples, 1.15 + 0.4 * epoch)
                box(ax, corner, (width / samples - 0.03, 0.34), place, rank_colour(rank), fill=0.4, **SMALL)
        for sample in range(samples):
            write(ax, left + (sample + 0.46) * width / samples, 1.0, sample, color=GREY, **SMALL)
    write(ax, LEFT, 1.0, "sample", color=GREY, ha="left", **SMALL)
    for epoch in range(len(told)):
        write(ax, LEFT, 1.32 + 0.4 * epoch, f"epoch {epoch}", ha="left")
    foot = 1.4 + 0.4 * len(told)
    write(
        ax,
        0.95,
        foot,
        "colour: the rank; number: the sample's place in that rank's shard",
        color=GREY,
        ha="left",
        **SMALL,
    )
    for rank, (left, width) in enumerate(pieces(6.3, RIGHT, world_size)):
        box(ax, (left, foot - 0.15), (width, 0.3), f"rank {rank}", rank_colour(rank), fill=0.4, **SMALL)
    return described(ax.figure, f"{title}. {len(told)} epochs, {world_size} ranks.")


def large_batches(accuracy: Mapping[str, Mapping[str, float]], factor: int, where: str) -> Picture:
    """Draw the accuracies in per cent that each optimizer ends with: small batch, large batch, then its remedies."""
    figure, axes = plt.subplots(1, len(accuracy), figsize=(9.5, 3.2), layout="constrained", sharey=True)
    lost, back = [], []
    for ax, (name, runs) in zip(axes, accuracy.items(), strict=True):
        (_, small), (_, same), *others = runs.items()
        how, best = max(others, key=lambda run: run[1])
        lost, back = [*lost, f"{name} {small - same:.0f}"], [*back, f"{best - same:.0f}"]
        for row, (label, value) in enumerate(runs.items()):
            colour = GREY if not row else BLUE if label == how else tint(BLUE, 0.35)
            ax.barh(row, value, color=colour)
            dark = not row or label == how
            ax.text(value - 2, row, f"{value:.1f}", ha="right", va="center", color="white" if dark else INK)
        ax.axvline(small, color=GREY, linewidth=1, linestyle=":")
        ax.set_title(f"{name}: best with {how}", loc="left")
        ax.set(xlim=(0, 100), xlabel="test accuracy in per cent", yticks=range(len(runs)), yticklabels=list(runs))
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    title = (
        f"{factor} times the batch costs {' and '.join(lost)} points; a larger rate brings {' and '.join(back)} back"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, weight="bold")
    figure.supxlabel(where, x=0.01, ha="left", color=GREY, fontsize=10)
    told = "; ".join(f"{name}, {label}: {one:.1f}" for name, runs in accuracy.items() for label, one in runs.items())
    return described(figure, f"{title}. Test accuracy in per cent, {where}. {told}.")
