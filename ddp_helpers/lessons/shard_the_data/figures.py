"""Figures of notebook 04: shards, the global batch, the orders of epochs, large batches."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from torch.utils.data import DistributedSampler

from ddp_helpers.draw.drawing import Picture, box, canvas, described, pieces, span, tint, write
from ddp_helpers.draw.labels import caption, finding
from ddp_helpers.draw.style import BLUE, GREY, INK, LEFT, RIGHT, SMALL, TIMES, rank_colour

# ---- the figures

Deals = Sequence[Sequence[Sequence[int]]]  # samples, by epoch, rank and position


def picture_of_shards(samples: int, world_size: int, drop_last: bool = False) -> Picture:
    """Draw the samples of each rank, and those that are repeated or dropped to make the shards equal."""
    sampler = partial(DistributedSampler, range(samples), world_size, shuffle=False, drop_last=drop_last)
    parts = [list(sampler(rank=rank)) for rank in range(world_size)]
    dealt = len(parts[0]) * world_size
    odd = abs(dealt - samples)
    fate = "repeated" if dealt > samples else "dropped" if dealt < samples else ""
    ends = f", and {odd} {'is' if odd == 1 else 'are'} {fate}" if fate else ""
    title = f"{samples} samples for {world_size} ranks: each gets {len(parts[0])}{ends} (drop_last={drop_last})"
    ax = canvas(1.7 + 0.5 * world_size, title)
    pitch = min(0.62, 6.95 / max(dealt, samples))
    _deal(ax, samples, world_size, dealt, pitch)
    for rank, part in enumerate(parts):
        write(ax, LEFT, 1.8 + 0.5 * rank, f"rank {rank}", ha="left", weight="bold")
        write(ax, RIGHT, 1.8 + 0.5 * rank, f"{len(part)} samples", ha="right")
    write(ax, 1.35 + pitch * ((dealt + samples) / 2 - 0.05), 0.65, fate, style="italic")
    shares = "; ".join(f"rank {rank} gets {', '.join(map(str, part))}" for rank, part in enumerate(parts))
    return described(ax.figure, f"{title}: {shares}.")


def _deal(ax: Axes, samples: int, world_size: int, dealt: int, pitch: float) -> None:
    """The epoch's order, with what is repeated or dropped at its end, and each rank's samples below it."""
    write(ax, LEFT, 1.05, "this epoch's\norder", ha="left")
    for place in range(max(dealt, samples)):
        rank, x, sample = place % world_size, 1.35 + place * pitch, place % samples
        if place < dealt:
            look = {"colour": rank_colour(rank), "hatch": "///" if place >= samples else ""}
            box(ax, (x, 1.6 + 0.5 * rank), (pitch * 0.9, 0.4), sample, **look)
        else:
            look = {"line": ":", "fill": 0.05, "color": GREY}
        box(ax, (x, 0.83), (pitch * 0.9, 0.44), sample, **look)


def global_batch(per_rank: int, world_size: int) -> Picture:
    """One optimizer step sees world_size batches side by side: together they are the global batch."""
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
    total = per_rank * world_size
    product = f"{world_size} ranks {TIMES} {per_rank} samples = a global batch of {total} samples"
    span(ax, LEFT, RIGHT, 3.2, product, size=13)
    return described(ax.figure, f"Batches side by side, one a rank: {product}, whose gradients one step averages.")


def owners(shards: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """The rank and the position in its shard of each sample."""
    return {sample: (rank, place) for rank, shard in enumerate(shards) for place, sample in enumerate(shard)}


def deals_by_epoch(forgotten: Deals, told: Deals) -> Picture:
    """Draw which rank has each sample in each epoch, without set_epoch and with it."""
    samples, world_size = sum(map(len, told[0])), len(told[0])
    cases = {"set_epoch forgotten": forgotten, "set_epoch called": told}
    moved = [
        sum(len({owners(shards)[sample][0] for shards in epochs}) > 1 for sample in range(samples))
        for epochs in cases.values()
    ]
    title = f"Without set_epoch {moved[0]} of {samples} samples ever change their rank; with it {moved[1]} do"
    ax = canvas(1.75 + 0.4 * len(told), title)
    write(ax, LEFT, 1.0, "sample", color=GREY, ha="left", **SMALL)
    for epoch in range(len(told)):
        write(ax, LEFT, 1.32 + 0.4 * epoch, f"epoch {epoch}", ha="left")
    for (left, width), (name, epochs) in zip(pieces(0.95, RIGHT, 2, gap=0.3), cases.items(), strict=True):
        write(ax, left, 0.7, name, weight="bold", ha="left")
        pitch = width / samples
        for sample in range(samples):
            write(ax, left + (sample + 0.46) * pitch, 1.0, sample, color=GREY, **SMALL)
        for epoch, shards in enumerate(epochs):
            for sample, (rank, place) in owners(shards).items():
                corner = (left + sample * pitch, 1.15 + 0.4 * epoch)
                box(ax, corner, (pitch - 0.03, 0.34), place, rank_colour(rank), fill=0.4, **SMALL)
    foot = 1.4 + 0.4 * len(told)
    key = "colour: the rank; number: the sample's place in that rank's shard"
    write(ax, 0.95, foot, key, color=GREY, ha="left", **SMALL)
    for rank, (left, width) in enumerate(pieces(6.3, RIGHT, world_size)):
        box(ax, (left, foot - 0.15), (width, 0.3), f"rank {rank}", rank_colour(rank), fill=0.4, **SMALL)
    return described(ax.figure, f"{title}. {len(told)} epochs, {world_size} ranks.")


def large_batches(accuracy: Mapping[str, Mapping[str, float]], factor: int, where: str) -> Picture:
    """Draw the accuracies in per cent that each optimizer ends with: small batch, large batch, then its remedies."""
    figure, axes = plt.subplots(1, len(accuracy), figsize=(9.5, 3.2), layout="constrained", sharey=True)
    lost, back = [], []
    for ax, (name, runs) in zip(axes, accuracy.items(), strict=True):
        small, same, *others = runs.values()
        best = max(others)
        lost, back = [*lost, f"{name} {small - same:.0f}"], [*back, f"{best - same:.0f}"]
        for row, value in enumerate(runs.values()):
            dark = not row or value == best
            ax.barh(row, value, color=GREY if not row else tint(BLUE, 1 if dark else 0.35))
            ax.text(value - 2, row, f"{value:.1f}", ha="right", va="center", color="white" if dark else INK)
        ax.axvline(small, color=GREY, linewidth=1, linestyle=":")
        ax.set_title(f"{name}: best with {max(list(runs)[2:], key=runs.get)}", loc="left")
        ax.set(xlim=(0, 100), xlabel="test accuracy in per cent", yticks=range(len(runs)), yticklabels=list(runs))
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    costs, gains = " and ".join(lost), " and ".join(back)
    title = f"{factor} times the batch costs {costs} points; a larger rate regains {gains}"
    finding(figure, title)
    caption(figure, where)
    told = "; ".join(f"{name}, {label}: {one:.1f}" for name, runs in accuracy.items() for label, one in runs.items())
    return described(figure, f"{title}. Test accuracy in per cent: {told}.")
