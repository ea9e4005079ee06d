"""Exercises of notebook 04."""

from collections.abc import Sequence

from ddp_helpers.lessons.exercise import Exercise


def repeated_samples(samples: int, world_size: int) -> int:
    """Samples that DistributedSampler deals a second time in one epoch, by default."""
    return -samples % world_size


def workers_per_rank(launcher: str, ranks_per_node: int, cpus_per_task: int) -> int:
    """Loader workers of a rank that keeps one CPU for training; launcher is "slurm" (srun) or "torchrun"."""
    cpus = cpus_per_task if launcher == "slurm" else cpus_per_task // ranks_per_node
    return max(0, cpus - 1)


def batch_plan(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """What a rank does in an epoch: per_rank batch, samples in its shard, steps, last_batch. None if uneven."""
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
