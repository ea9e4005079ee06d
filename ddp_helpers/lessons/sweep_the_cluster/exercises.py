"""Exercises of notebook 08."""

from ddp_helpers.lessons.exercise import Exercise


def sweep_gpu_hours(sizes: list[int], repeats: int, minutes: float) -> float:
    """GPU-hours of a sweep over so many GPUs, in which every job takes so many minutes."""
    return sum(sizes) * repeats * minutes / 60


def epoch_steps(images: int, ranks: int, size: int, kind: str) -> int:
    """Optimizer steps in an epoch; size is the global batch if kind is strong, and per rank if it is weak."""
    return images // (size if kind == "strong" else size * ranks)


def soonest(offers: dict[int, tuple], budget: float) -> int:
    """The number of GPUs whose result is there first, at no more GPU-hours than the budget; 0 if all cost more."""
    there = {gpus: wait + run for gpus, (wait, run) in offers.items() if gpus * run / 60 <= budget}
    return min(sorted(there), key=there.get, default=0)


OFFERS = {1: (0, 120), 2: (5, 65), 4: (90, 40)}

EXERCISES = [
    Exercise(
        sweep_gpu_hours,
        [([1, 2, 4, 8], 3, 6), ([1], 1, 60), ([4, 4], 2, 15)],
        {
            "A job on four GPUs costs four times its minutes: add up GPUs, not jobs.": lambda sizes, repeats, minutes: (
                len(sizes) * repeats * minutes / 60
            ),
            "Those are GPU-minutes, and an hour has 60 of them.": lambda sizes, repeats, minutes: (
                sum(sizes) * repeats * minutes
            ),
            "Each size runs as often as there are repeats.": lambda sizes, _, minutes: sum(sizes) * minutes / 60,
        },
    ),
    Exercise(
        epoch_steps,
        [(4096, 1, 256, "strong"), (4096, 4, 256, "strong"), (4096, 4, 256, "weak"), (60000, 2, 100, "weak")],
        {
            "With weak scaling the size is per rank: a step takes it from every rank.": lambda images, _, size, kind: (
                images // size
            ),
            "With strong scaling the size is the global batch: the ranks share it.": lambda images, ranks, size, _: (
                images // (size * ranks)
            ),
            "Strong is the global batch, which the ranks share; weak is the batch of each rank.": (
                lambda images, ranks, size, kind: images // (size * ranks if kind == "strong" else size)
            ),
        },
    ),
    Exercise(
        soonest,
        [(OFFERS, 10), (OFFERS, 2.1), (OFFERS, 1), ({4: (30, 30), 2: (10, 50)}, 5), ({8: (60, 15)}, 2)],
        {
            "The result is there after the wait and the run: add them.": lambda offers, budget: min(
                [gpus for gpus in sorted(offers) if gpus * offers[gpus][1] / 60 <= budget],
                key=lambda gpus: offers[gpus][1],
                default=0,
            ),
            "GPUs are paid for while the job runs, not while it waits.": lambda offers, budget: min(
                [gpus for gpus in sorted(offers) if gpus * sum(offers[gpus]) / 60 <= budget],
                key=lambda gpus: sum(offers[gpus]),
                default=0,
            ),
            "That costs more GPU-hours than the budget has: GPUs times run, in hours.": lambda offers, _: min(
                sorted(offers), key=lambda gpus: sum(offers[gpus])
            ),
        },
    ),
]
