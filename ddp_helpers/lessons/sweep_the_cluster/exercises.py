"""The exercises of notebook 08: GPU-hours of a sweep, steps of an epoch, the soonest offer.

`lessons.check` asks them for verdicts, in the driver process; no ranks.
"""

import math

from ddp_helpers.lessons.exercise import Exercise

Offers = dict[int, tuple[float, float]]  # minutes of waiting and of running, by number of GPUs

# ---- GPU-hours


def sweep_gpu_hours(sizes: list[int], repeats: int, minutes: float) -> float:
    """Compute the GPU-hours of a sweep.

    sizes: the GPUs of its jobs, each of which runs `repeats` times and takes `minutes`.
    """
    return sum(sizes) * repeats * minutes / 60


_HOURS_TRAPS = {
    "A job on four GPUs costs four times its minutes: add up GPUs.": (
        lambda sizes, repeats, minutes: len(sizes) * repeats * minutes / 60
    ),
    "Those are GPU-minutes, and an hour has 60 of them.": (
        lambda sizes, repeats, minutes: sweep_gpu_hours(sizes, repeats, minutes * 60)
    ),
}

# ---- steps of an epoch


def epoch_steps(images: int, ranks: int, size: int, kind: str) -> int:
    """Count the optimizer steps in an epoch.

    size: the global batch if kind is strong, and the per-rank batch if it is weak.
    """
    return images // (size if kind == "strong" else size * ranks)


_STEPS_TRAPS = {
    "With weak scaling the size is per rank: a step takes it from every rank.": (
        lambda images, ranks, size, kind: images // size
    ),
    "With strong scaling the ranks share the global batch.": (
        lambda images, ranks, size, kind: images // (size * ranks)
    ),
    "Strong is the global batch, which the ranks share; weak is the per-rank batch.": (
        lambda images, ranks, size, kind: images // (size * ranks if kind == "strong" else size)
    ),
}

# ---- the soonest offer


def soonest(offers: Offers, budget: float) -> int:
    """Choose the number of GPUs whose result is ready first, within a budget of GPU-hours.

    0 if all cost more.
    """
    affordable = [gpus for gpus, (_, run) in offers.items() if gpus * run / 60 <= budget]
    return min(affordable, key=lambda gpus: (sum(offers[gpus]), gpus), default=0)


_OFFERS: Offers = {1: (0, 120), 2: (5, 65), 4: (90, 40)}
_SOONEST_CASES = [
    (_OFFERS, 10),
    (_OFFERS, 2.1),
    (_OFFERS, 1),
    ({4: (30, 30), 2: (10, 50)}, 5),
    ({8: (60, 15)}, 2),
]
_SOONEST_TRAPS = {
    "The result is ready after the wait and the run: add them.": (
        lambda offers, budget: soonest(
            {gpus: (0, run) for gpus, (_, run) in offers.items()}, budget
        )
    ),
    "GPUs are paid for while the job runs, not while it waits.": (
        lambda offers, budget: soonest(
            {gpus: (0, sum(both)) for gpus, both in offers.items()}, budget
        )
    ),
    "That costs more GPU-hours than the budget has: GPUs times run, in hours.": (
        lambda offers, budget: soonest(offers, math.inf)
    ),
}

EXERCISES = [
    Exercise(
        sweep_gpu_hours,
        [([1, 2, 4, 8], 3, 6), ([1], 1, 60), ([4, 4], 2, 15)],
        _HOURS_TRAPS,
    ),
    Exercise(
        epoch_steps,
        [
            (4096, 1, 256, "strong"),
            (4096, 4, 256, "strong"),
            (4096, 4, 256, "weak"),
            (60000, 2, 100, "weak"),
        ],
        _STEPS_TRAPS,
    ),
    Exercise(soonest, _SOONEST_CASES, _SOONEST_TRAPS),
]
