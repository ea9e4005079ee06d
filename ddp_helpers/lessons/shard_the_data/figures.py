"""The figures of notebook 04: shards, the global batch, the orders of epochs, large batches.

The notebook calls them, in its own process; they draw from their arguments alone.
"""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from torch.utils.data import DistributedSampler

from ddp_helpers.draw.drawing import (
    Picture,
    box,
    canvas,
    described,
    equal_parts,
    span,
    tint,
    write_text,
)
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREY, INK, LEFT, RIGHT, SMALL, TIMES, WIDTH, rank_colour

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


# ---- the global batch


def global_batch(per_rank: int, world_size: int) -> Picture:
    """Draw the batches of one optimizer step side by side: together they are the global batch."""
    ax = canvas(3.75, "One optimizer step sees the batches of all ranks")
    for rank, (left, width) in enumerate(equal_parts(LEFT, RIGHT, world_size)):
        middle = left + width / 2
        box(ax, (left, 0.55), (width, 2.4), colour=rank_colour(rank), fill=0.08)
        write_text(ax, middle, 0.77, f"rank {rank}", weight="bold")
        _draw_dots(ax, middle, min(width * 0.85, 1.5), per_rank, rank_colour(rank))
        write_text(ax, middle, 2.72, f"{per_rank} samples", size=11.5 if width > 1.2 else 10)
    total = per_rank * world_size
    product = f"{world_size} ranks {TIMES} {per_rank} samples = a global batch of {total} samples"
    span(ax, LEFT, RIGHT, 3.2, product, size=13)
    return described(
        ax.figure,
        f"Batches side by side, one a rank: {product}, whose gradients one step averages.",
    )


def _draw_dots(ax: Axes, middle: float, width: float, count: int, colour: str) -> None:
    """Draw so many dots as a grid around a point, in 1.5 inches of height."""
    height = 1.5
    columns = math.ceil(math.sqrt(count * width / height))
    rows = math.ceil(count / columns)
    pitch = min(width / columns, height / rows)
    grid = [divmod(dot, columns) for dot in range(count)]
    x = [middle + (column - columns / 2 + 0.5) * pitch for _, column in grid]
    y = [1.72 + (row - rows / 2 + 0.5) * pitch for row, _ in grid]
    ax.scatter(x, y, s=(pitch * 45) ** 2, color=colour, linewidths=0)


# ---- the orders of epochs

Shards = Sequence[Sequence[int]]  # of one epoch: samples, by rank and position


def shards_by_epoch(
    without_set_epoch: Sequence[Shards],
    with_set_epoch: Sequence[Shards],
) -> Picture:
    """Draw which rank has each sample in each epoch, if set_epoch is forgotten and if it is called.

    Both have the shards of each epoch.
    """
    epochs, world_size = len(with_set_epoch), len(with_set_epoch[0])
    samples = sum(map(len, with_set_epoch[0]))
    moved = _count_moved(without_set_epoch)
    title = f"Without set_epoch {moved} of {samples} samples ever change their rank; "
    title += f"with it {_count_moved(with_set_epoch)} do"
    ax = canvas(1.75 + 0.4 * epochs, title)
    write_text(ax, LEFT, 1.0, "sample", color=GREY, ha="left", **SMALL)
    for epoch in range(epochs):
        write_text(ax, LEFT, 1.32 + 0.4 * epoch, f"epoch {epoch}", ha="left")
    (left, width), (right, _) = equal_parts(0.95, RIGHT, 2, gap=0.3)
    _draw_epochs(ax, left, width, "set_epoch forgotten", without_set_epoch)
    _draw_epochs(ax, right, width, "set_epoch called", with_set_epoch)
    foot = 1.4 + 0.4 * epochs
    key = "colour: the rank; number: the sample's place in that rank's shard"
    write_text(ax, 0.95, foot, key, color=GREY, ha="left", **SMALL)
    for rank, (left, width) in enumerate(equal_parts(6.3, RIGHT, world_size)):
        corner, extent = (left, foot - 0.15), (width, 0.3)
        box(ax, corner, extent, f"rank {rank}", rank_colour(rank), fill=0.4, **SMALL)
    return described(ax.figure, f"{title}. {epochs} epochs, {world_size} ranks.")


def _owners(shards: Shards) -> dict[int, tuple[int, int]]:
    """Map each sample to its rank, and its position in the rank's shard."""
    owners = {}
    for rank, shard in enumerate(shards):
        for position, sample in enumerate(shard):
            owners[sample] = rank, position
    return owners


def _count_moved(epochs: Sequence[Shards]) -> int:
    """Count the samples that are not on the same rank in all epochs."""
    owners = [_owners(shards) for shards in epochs]
    ranks = [{owner[sample][0] for owner in owners} for sample in owners[0]]
    return sum(len(of_sample) > 1 for of_sample in ranks)


def _draw_epochs(
    ax: Axes,
    left: float,
    width: float,
    name: str,
    epochs: Sequence[Shards],
) -> None:
    """Draw a row for each epoch, and in it a box for each sample, in the colour of its rank."""
    write_text(ax, left, 0.7, name, weight="bold", ha="left")
    samples = sum(map(len, epochs[0]))
    pitch = width / samples
    for sample in range(samples):
        write_text(ax, left + (sample + 0.46) * pitch, 1.0, sample, color=GREY, **SMALL)
    for epoch, shards in enumerate(epochs):
        for sample, (rank, position) in _owners(shards).items():
            corner, extent = (left + sample * pitch, 1.15 + 0.4 * epoch), (pitch - 0.03, 0.34)
            box(ax, corner, extent, position, rank_colour(rank), fill=0.4, **SMALL)


# ---- large batches


def large_batches(
    accuracy: Mapping[str, Mapping[str, float]],
    factor: int,
    where: str,
) -> Picture:
    """Draw the test accuracy that runs with each optimizer end with.

    accuracy: in per cent, by optimizer and run: the small batch first, then the large one, then
    the large one with remedies. factor: large over small; where: for the caption.
    """
    size = WIDTH, 3.2
    figure, axes = plt.subplots(1, len(accuracy), figsize=size, layout="constrained", sharey=True)
    costs, gains = [], []
    for ax, (optimizer, runs) in zip(axes, accuracy.items(), strict=True):
        small, large, *remedied = runs.values()
        best = max(remedied)
        costs.append(f"{optimizer} {small - large:.0f}")
        gains.append(f"{best - large:.0f}")
        _draw_runs(ax, runs, best)
        remedy = next(run for run in list(runs)[2:] if runs[run] == best)
        ax.set_title(f"{optimizer}: best with {remedy}", loc="left")
    axes[0].invert_yaxis()
    title = f"{factor} times the batch costs {' and '.join(costs)} points; "
    title += f"a larger rate regains {' and '.join(gains)}"
    write_title(figure, title)
    write_caption(figure, where)
    texts: list[str] = []
    for optimizer, runs in accuracy.items():
        texts += [f"{optimizer}, {run}: {percent:.1f}" for run, percent in runs.items()]
    return described(figure, f"{title}. Test accuracy in per cent: {'; '.join(texts)}.")


def _draw_runs(ax: Axes, runs: Mapping[str, float], best: float) -> None:
    """Draw a bar for each run of an optimizer: the small batch grey, the best of the large dark."""
    for row, percent in enumerate(runs.values()):
        dark = row == 0 or percent == best
        colour = GREY if row == 0 else tint(BLUE, 1 if dark else 0.35)
        ink = "white" if dark else INK
        ax.barh(row, percent, color=colour)
        ax.text(percent - 2, row, f"{percent:.1f}", ha="right", va="center", color=ink)
    small, *_ = runs.values()
    ax.axvline(small, color=GREY, linewidth=1, linestyle=":")
    ax.set(xlim=(0, 100), xlabel="test accuracy in per cent")
    ax.set(yticks=range(len(runs)), yticklabels=list(runs))
    ax.tick_params(axis="y", length=0)
