"""Exercises of notebook 09."""

from statistics import median

from ddp_helpers.lessons.exercise import Exercise

Runs = list[tuple[int, str, float]]


def efficiency_on(n: int, seconds: float, alone: float) -> float:
    """Speed-up on n GPUs, divided by n; alone: the seconds on one."""
    return alone / seconds / n


def serial_part(n: int, times: float) -> float:
    """The serial share of the work, 0 to 1, at which n GPUs are so many times as fast as one."""
    return (1 / times - 1 / n) / (1 - 1 / n)


def gpus_to_ask_for(runs: Runs, least: float) -> int:
    """The fastest number of GPUs whose efficiency against the fewest is at least `least`."""
    return chosen(middles(runs), least)


def middles(runs: Runs, states: tuple[str, ...] = ("done",), middle=median) -> dict[int, float]:
    """The seconds by number of GPUs: the middle of the repeats that count."""
    seconds: dict[int, list[float]] = {}
    for gpus, state, took in runs:
        if state in states:
            seconds.setdefault(gpus, []).append(took)
    return {gpus: middle(repeats) for gpus, repeats in seconds.items()}


def chosen(seconds: dict[int, float], least: float, base: int | None = None) -> int:
    """The fastest number of GPUs whose efficiency, counted from `base`, is enough."""
    fewest = min(seconds)
    work = seconds[fewest] * (base or fewest)
    good = [gpus for gpus, took in seconds.items() if work / (took * gpus) >= least]
    return min(good or [fewest], key=seconds.get)


def mean(repeats: list[float]) -> float:
    """The mean, which one slow repeat moves."""
    return sum(repeats) / len(repeats)


def done(seconds: dict[int, float]) -> Runs:
    """Finished runs, one of each size."""
    return [(gpus, "done", took) for gpus, took in seconds.items()]


FAILED = [*done({1: 104, 2: 54, 4: 30, 8: 22}), (1, "done", 100), (8, "failed", 3)]
SLOW = [*done({1: 100, 2: 50, 4: 40}), (2, "done", 51), (2, "done", 90)]
PUBLISHED = done({4: 2.66, 8: 1.43, 16: 0.82, 32: 0.5})

EXERCISES = [
    Exercise(
        efficiency_on,
        [(4, 30.0, 100.0), (8, 25.0, 100.0), (32, 0.49, 11.7)],
        {
            "That is the speed-up; divide it by the number of GPUs.": lambda n, seconds, alone: alone / seconds,
            "Upside down: speed-up is the time on one GPU divided by the time on n.": lambda n, seconds, alone: (
                seconds / alone / n
            ),
        },
    ),
    Exercise(
        serial_part,
        [(32, 16.0), (4, 4.0), (4, 2.0)],
        {
            "That is the efficiency that is lost; put the speed-up into Amdahl's formula instead.": lambda n, times: (
                1 - times / n
            ),
            "That counts the parallel part as free; it takes (1 - serial) / n.": lambda n, times: 1 / times,
        },
    ),
    Exercise(
        gpus_to_ask_for,
        [(FAILED, 0.8), (PUBLISHED, 0.8), (SLOW, 0.9), (done({1: 183.18, 4: 112.59}), 0.5)],
        {
            "Count finished runs only: one that failed early looks fast.": lambda runs, least: chosen(
                middles(runs, ("done", "failed")), least
            ),
            "That is the fastest, whatever it costs; first keep those that are efficient enough.": lambda runs, least: (
                chosen(middles(runs), 0)
            ),
            "The fewest GPUs of the table are the base, and need not be one.": lambda runs, least: chosen(
                middles(runs), least, base=1
            ),
            "One slow repeat moves a mean; take the median of the repeats.": lambda runs, least: chosen(
                middles(runs, middle=mean), least
            ),
        },
    ),
]
