"""Exercises of notebook 08: GPU hours of a sweep, steps of an epoch, the soonest offer."""

import math

from ddp_helpers.lessons.exercise import Exercise


def sweep_gpu_hours(sizes: list[int], repeats: int, minutes: float) -> float:
    """GPU-hours of a sweep over so many GPUs, in which every job takes so many minutes."""
    return sum(sizes) * repeats * minutes / 60


HOURS_TRAPS = {
    "A job on four GPUs costs four times its minutes: add up GPUs.": lambda sizes, n, took: len(sizes) * n * took / 60,
    "Those are GPU-minutes, and an hour has 60 of them.": lambda sizes, n, took: sum(sizes) * n * took,
    "Each size runs as often as there are repeats.": lambda sizes, n, took: sum(sizes) * took / 60,
}


def epoch_steps(images: int, ranks: int, size: int, kind: str) -> int:
    """Optimizer steps in an epoch; size is the global batch if kind is strong, and per rank if it is weak."""
    return images // (size if kind == "strong" else size * ranks)


STEPS_TRAPS = {
    "With weak scaling the size is per rank: a step takes it from every rank.": lambda n, ranks, size, kind: n // size,
    "With strong scaling the ranks share the global batch.": lambda n, ranks, size, kind: n // (size * ranks),
    "Strong is the global batch, which the ranks share; weak is the batch of each rank.": (
        lambda n, ranks, size, kind: n // (size * ranks if kind == "strong" else size)
    ),
}


def soonest(offers: dict[int, tuple], budget: float) -> int:
    """The number of GPUs whose result is there first, at no more GPU-hours than the budget; 0 if all cost more."""
    return first_of(offers, budget)


def first_of(offers: dict[int, tuple], budget: float, compared: slice = slice(2), paid: slice = slice(1, 2)) -> int:
    """The same, with the parts of (wait, run) that are compared, and those that are paid for."""
    there = {gpus: sum(one[compared]) for gpus, one in offers.items() if gpus * sum(one[paid]) / 60 <= budget}
    return min(sorted(there), key=there.get, default=0)


OFFERS, RUN = {1: (0, 120), 2: (5, 65), 4: (90, 40)}, slice(1, 2)
SOONEST_TRAPS = {
    "The result is there after the wait and the run: add them.": lambda *case: first_of(*case, compared=RUN),
    "GPUs are paid for while the job runs, not while it waits.": lambda *case: first_of(*case, paid=slice(2)),
    "That costs more GPU-hours than the budget has: GPUs times run, in hours.": (
        lambda offers, budget: first_of(offers, math.inf)
    ),
}

EXERCISES = [
    Exercise(sweep_gpu_hours, [([1, 2, 4, 8], 3, 6), ([1], 1, 60), ([4, 4], 2, 15)], HOURS_TRAPS),
    Exercise(
        epoch_steps,
        [(4096, 1, 256, "strong"), (4096, 4, 256, "strong"), (4096, 4, 256, "weak"), (60000, 2, 100, "weak")],
        STEPS_TRAPS,
    ),
    Exercise(
        soonest,
        [(OFFERS, 10), (OFFERS, 2.1), (OFFERS, 1), ({4: (30, 30), 2: (10, 50)}, 5), ({8: (60, 15)}, 2)],
        SOONEST_TRAPS,
    ),
]
