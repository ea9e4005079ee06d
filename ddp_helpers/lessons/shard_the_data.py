"""Notebook 04: its exercises, the diagrams of shards and of the global batch, and the figure of learning rates."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.notebook.drawing import (
    BLUE,
    GREY,
    LEFT,
    RED,
    RIGHT,
    TIMES,
    Picture,
    box,
    canvas,
    described,
    pieces,
    rank_colour,
    span,
    write,
)


def repeated_samples(samples: int, world_size: int) -> int:
    """Samples that DistributedSampler deals a second time in one epoch, by default."""
    return -samples % world_size


def workers_per_rank(launcher: str, ranks_per_node: int, cpus_per_task: int) -> int:
    """Loader workers of a rank that keeps one CPU for training; launcher is "slurm" (srun) or "torchrun"."""
    cpus = cpus_per_task if launcher == "slurm" else cpus_per_task // ranks_per_node
    return max(0, cpus - 1)


def batch_plan(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """Compute a rank's epoch: per_rank batch, samples in its shard, steps, last_batch. None if uneven."""
    return None if global_batch % world_size else plan(-(-samples // world_size), global_batch // world_size)


def exact_accuracy(reports: Sequence[tuple[int, int]]) -> float:
    """Accuracy over all ranks, each of which reports (correct, samples)."""
    return sum(correct for correct, _ in reports) / sum(size for _, size in reports)


def plan(shard: int, per_rank: int) -> dict[str, int]:
    """The plan for a shard and a per-rank batch."""
    steps = -(-shard // per_rank)
    return {"per_rank": per_rank, "shard": shard, "steps": steps, "last_batch": shard - (steps - 1) * per_rank}


def rounded_down(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """A mistake: a shard without padding."""
    return None if global_batch % world_size else plan(samples // world_size, global_batch // world_size)


def not_divided(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """A mistake: the global batch on every rank."""
    return None if global_batch % world_size else plan(-(-samples // world_size), global_batch)


EXERCISES = [
    Exercise(
        repeated_samples,
        [(10, 4), (12, 4), (9, 1), (9, 2), (513, 8), (3, 8)],
        {
            "That many are left over; the sampler fills up to the next multiple.": lambda samples, ranks: (
                samples % ranks
            ),
            "That many are in each shard.": lambda samples, ranks: -(-samples // ranks),
        },
    ),
    Exercise(
        workers_per_rank,
        [(name, ranks, cpus) for name in ("slurm", "torchrun") for ranks in (1, 2, 4) for cpus in (1, 3, 8)],
        {
            "Under torchrun the task's CPUs are shared by the ranks of the node.": lambda _, ranks, cpus: cpus - 1,
            "Under srun the CPUs of a task are one rank's own.": lambda _, ranks, cpus: max(0, cpus // ranks - 1),
            "One CPU of each rank is for training, so it is not a worker's.": lambda name, ranks, cpus: (
                cpus if name == "slurm" else cpus // ranks
            ),
        },
    ),
    Exercise(
        batch_plan,
        [(100, 2, 8), (60_000, 8, 64), (100, 2, 65), (513, 4, 64), (128, 4, 32)],
        {
            "A batch that the ranks cannot share evenly has no plan: give None.": lambda samples, ranks, batch: plan(
                -(-samples // ranks), batch // ranks
            ),
            "The sampler pads, so the shard is rounded up.": rounded_down,
            "A rank takes its part of the global batch, not all of it.": not_divided,
        },
    ),
    Exercise(
        exact_accuracy,
        [([(2, 3), (2, 3), (2, 2), (2, 2)],), ([(3, 3), (0, 1)],), ([(7, 9)],)],
        {
            "An average of averages: add up both numbers over the ranks, and divide once.": lambda reports: (
                sum(correct / size for correct, size in reports) / len(reports)
            ),
            "Divide by the samples, not by the ranks.": lambda reports: (
                sum(correct for correct, _ in reports) / len(reports)
            ),
        },
    ),
]


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


def learning_rates(
    ranks: Sequence[int], steps: Sequence[int], same: Sequence[float], scaled: Sequence[float]
) -> Picture:
    """Loss after one epoch for each number of ranks: with the same learning rate, and with one times the ranks."""
    figure, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
    places, what = range(len(ranks)), (("the same learning rate", same), ("learning rate times ranks", scaled))
    for (label, losses), colour in zip(what, (RED, BLUE), strict=True):
        ax.plot(places, losses, "o-", color=colour)
        ax.annotate(label, (len(ranks) - 1, losses[-1]), (-8, 10), textcoords="offset points", ha="right", color=colour)
    ax.set(
        title="Toy regression, one epoch, the same batch per rank",
        xticks=places,
        xticklabels=[f"{count}\n{taken} steps" for count, taken in zip(ranks, steps, strict=True)],
        xlabel="ranks, and optimizer steps in the epoch",
        ylabel="mean squared error after the epoch",
        ylim=(0, 1.12 * max(*same, *scaled)),
    )
    ends = "; ".join(
        f"{count} rank{'s' * (count > 1)}, {taken} steps: {one:.2f} with the same, {other:.2f} with {count} times it"
        for count, taken, one, other in zip(ranks, steps, same, scaled, strict=True)
    )
    return described(
        figure,
        f"Mean squared error of the toy after one epoch, by number of ranks, learning rate the same or scaled. {ends}.",
    )
