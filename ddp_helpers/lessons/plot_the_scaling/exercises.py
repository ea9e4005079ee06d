"""Exercises of notebook 09; two of them run on real ranks."""

from statistics import mean, median

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case, sum_over_ranks

Runs = list[tuple[int, str, float]]


def job_rate(images: int, seconds: float) -> float:
    """Images per second of the whole job, on every rank, from the images and seconds of this one."""
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return sum_over_ranks(images) / longest.item()


RATE_TRAPS = {
    "That is this rank's own speed; the job's images are those of all ranks.": lambda images, seconds: images / seconds,
    "The ranks work at the same time, and the job takes as long as the slowest: MAX, not a sum.": (
        lambda images, seconds: sum_over_ranks(images) / sum_over_ranks(seconds)
    ),
    "A rank that is done early waits: divide all images by the longest seconds, once.": (
        lambda images, seconds: sum_over_ranks(images / seconds)
    ),
}


def late_rank(waited: float) -> int:
    """The rank that the others waited for, on every rank, from the seconds that this one has waited."""
    return int(gathered(waited).argmin())


def gathered(value: float) -> torch.Tensor:
    """The numbers of all ranks."""
    everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([value]))
    return torch.cat(everyone)


LATE_TRAPS = {
    "That rank waited longest, so it came first; the late one waits least.": lambda own: int(gathered(own).argmax()),
    "That is the least wait, and not the rank that has it.": lambda own: gathered(own).min().item(),
    "Each rank names itself: gather the waits of all ranks first.": lambda own: dist.get_rank(),
}


def gpus_to_ask_for(runs: Runs, least: float) -> int:
    """The fastest number of GPUs whose efficiency against the fewest is at least `least`."""
    return fastest(middles(runs), least)


def middles(runs: Runs, states: tuple[str, ...] = ("done",), middle=median) -> dict[int, float]:
    """The seconds by number of GPUs: the middle of the repeats that count."""
    seconds: dict[int, list[float]] = {}
    for gpus, state, took in runs:
        if state in states:
            seconds.setdefault(gpus, []).append(took)
    return {gpus: middle(repeats) for gpus, repeats in seconds.items()}


def fastest(seconds: dict[int, float], least: float, base: int | None = None) -> int:
    """Of the numbers of GPUs that are efficient enough, the one with the fewest seconds."""
    return min(efficient(seconds, least, base), key=seconds.get)


def efficient(seconds: dict[int, float], least: float, base: int | None = None) -> list[int]:
    """The numbers of GPUs whose efficiency, counted from `base`, is enough; at least the fewest."""
    fewest = min(seconds)
    work = seconds[fewest] * (base or fewest)
    return [gpus for gpus, took in seconds.items() if work / (took * gpus) >= least] or [fewest]


def done(seconds: dict[int, float]) -> Runs:
    """Finished runs, one of each size."""
    return [(gpus, "done", took) for gpus, took in seconds.items()]


FAILED = [*done({1: 104, 2: 54, 4: 30, 8: 22}), (1, "done", 100), (8, "failed", 3)]
SLOW = [*done({1: 100, 2: 50, 4: 40}), (2, "done", 51), (2, "done", 90)]
LUCKY = [*done({1: 100, 2: 55, 4: 50}), (4, "done", 20), (4, "done", 51)]
SLOWER, TWO = done({1: 100, 2: 52, 4: 30, 8: 40}), done({1: 183.18, 4: 112.59})
PUBLISHED = done({4: 2.66, 8: 1.43, 16: 0.82, 32: 0.5})
ASK_TRAPS = {
    "Count finished runs only: one that failed early looks fast.": (
        lambda runs, least: fastest(middles(runs, ("done", "failed")), least)
    ),
    "That is the fastest, whatever it costs; first keep those that are efficient enough.": (
        lambda runs, least: fastest(middles(runs), 0)
    ),
    "The fewest GPUs of the table are the base, and need not be one.": (
        lambda runs, least: fastest(middles(runs), least, base=1)
    ),
    "One slow repeat moves a mean; take the median of the repeats.": (
        lambda runs, least: fastest(middles(runs, middle=mean), least)
    ),
    "The best repeat may be luck; take the median of the repeats.": (
        lambda runs, least: fastest(middles(runs, middle=min), least)
    ),
    "Those are the most GPUs that are efficient enough; of these take the fastest.": (
        lambda runs, least: max(efficient(middles(runs), least))
    ),
}

EXERCISES = [
    OnRanks(job_rate, [((100, 2.0), (50, 2.5)), ((64, 1.0), (64, 2.0), (64, 1.5))], RATE_TRAPS, call_with_own_case),
    OnRanks(late_rank, [((0.5,), (0.25,), (0.0,)), ((0.0,), (1.0,))], LATE_TRAPS, call_with_own_case),
    Exercise(
        gpus_to_ask_for,
        [(FAILED, 0.8), (PUBLISHED, 0.8), (SLOW, 0.9), (LUCKY, 0.6), (SLOWER, 0.2), (TWO, 0.5)],
        ASK_TRAPS,
    ),
]
