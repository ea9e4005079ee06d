"""Exercises of notebook 01."""

import math

from ddp_helpers.lessons.exercise import Exercise


def best_speed_up(p: float) -> float:
    """Old time divided by new time, if a share p of the old time costs nothing any more."""
    return 1 / (1 - p)


def fastest_rate(seconds: list[float], images: int) -> float:
    """Images per second of the fastest pass. The first pass pays for start-up and is left out."""
    return images / min(seconds[1:])


def epochs_until_compiling_pays(images: int, before: float, after: float, compile_seconds: float) -> int | None:
    """Whole epochs until a compiled run is no longer behind; the rates are in images per second. None if never."""
    saved = images / before - images / after
    return math.ceil(compile_seconds / saved) if saved > 0 else None


def extra_gpu_hours(one: float, many: float, gpus: int) -> float:
    """GPU hours of a job on many GPUs minus those of the same job on one; the times are in seconds."""
    return (many * gpus - one) / 3600


def mean_rate(seconds: list[float], images: int) -> float:
    """A mistake: the mean of the passes, where the fastest counts."""
    return images * (len(seconds) - 1) / sum(seconds[1:])


def rounded_down(images: int, before: float, after: float, compile_seconds: float) -> int | None:
    """A mistake: the last epoch before it pays."""
    saved = images / before - images / after
    return int(compile_seconds / saved) if saved > 0 else None


EXERCISES = [
    Exercise(
        best_speed_up,
        [(0.5,), (0.2,), (0.0,)],
        {
            "What is left of the old time is 1 - p; divide the old time, 1, by it.": lambda p: 1 / p if p else 1.0,
            "That is the time that is left; the speed-up is the old time divided by it.": lambda p: 1 - p,
        },
    ),
    Exercise(
        fastest_rate,
        [([9.0, 2.0, 1.6, 2.4], 4096), ([1.0, 1.25, 1.6], 512), ([3.0, 2.0], 1000)],
        {
            "The first pass does not count, even where it is the fastest.": lambda s, images: images / min(s),
            "A busy machine can only slow a pass: take the fastest one, not the mean.": mean_rate,
            "That is the seconds of the fastest pass; the rate is images divided by them.": lambda s, _: min(s[1:]),
        },
    ),
    Exercise(
        epochs_until_compiling_pays,
        [(60_000, 1000, 1500, 30), (60_000, 3000, 3200, 61), (60_000, 1000, 900, 30), (1_000_000, 2000, 4000, 40)],
        {
            "Round up: after a part of an epoch nothing is finished.": rounded_down,
            "A compiled step that is not faster never pays: give None.": lambda images, before, after, extra: math.ceil(
                extra / (images / before - images / after)
            ),
            "Divide by the seconds that an epoch saves, not by all that it takes.": lambda images, b, a, extra: (
                math.ceil(extra / (images / a)) if a > b else None
            ),
        },
    ),
    Exercise(
        extra_gpu_hours,
        [(3600, 1800, 4), (3600, 900, 4), (7200, 3600, 2)],
        {
            "All GPUs are paid for as long as the job runs: multiply by their number.": lambda one, many, gpus: (
                (many - one) / 3600
            ),
            "The times are in seconds, and an hour has 3,600 of them.": lambda one, many, gpus: many * gpus - one,
        },
    ),
]
