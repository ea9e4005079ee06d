"""The exercises of notebook 09: the job's rate, the late rank, how many GPUs to ask for.

`lessons.check` asks them for verdicts in the learner's process. Answers to the first two, and
their oracles, run on ranks that are forked from it, in a gloo group.
"""

from collections.abc import Callable, Sequence
from statistics import mean, median

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case, sum_over_ranks

Runs = list[tuple[int, str, float]]  # of each run its GPUs, its state and its seconds

# ---- the rate of the job


def job_rate(images: int, seconds: float) -> float:
    """Compute the job's images per second from the images and seconds of this rank.

    Every rank calls it, and gets the same.
    """
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return sum_over_ranks(images) / longest.item()


_RATE_TRAPS = {
    "That is this rank's own speed; the job's images are those of all ranks.": (
        lambda images, seconds: images / seconds
    ),
    "The ranks work at the same time, and the job takes as long as the slowest: MAX, not a sum.": (
        lambda images, seconds: sum_over_ranks(images) / sum_over_ranks(seconds)
    ),
    "A rank that is done early waits: divide all images by the longest seconds, once.": (
        lambda images, seconds: sum_over_ranks(images / seconds)
    ),
}

# ---- the late rank


def late_rank(waited: float) -> int:
    """Return the rank that the others waited for, from the seconds that this rank has waited.

    Every rank calls it, and gets the same.
    """
    return int(_gather(waited).argmin())


def _gather(value: float) -> torch.Tensor:
    """Collect the numbers of all ranks, in their order; every rank calls it with its own."""
    values = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value]))
    return torch.cat(values)


_LATE_TRAPS = {
    "That rank waited longest, so it came first; the late one waits least.": (
        lambda waited: int(_gather(waited).argmax())
    ),
    "That is the least wait, and not the rank that has it.": (
        lambda waited: _gather(waited).min().item()
    ),
    "Each rank names itself: gather the waits of all ranks first.": (
        lambda waited: dist.get_rank()
    ),
}

# ---- how many GPUs to ask for


def gpus_to_ask_for(runs: Runs, least: float) -> int:
    """Return the fastest number of GPUs whose efficiency against the fewest is at least `least`."""
    return _fastest(_typical_seconds(runs), least)


def _typical_seconds(
    runs: Runs,
    states: Sequence[str] = ("done",),
    average: Callable[[list[float]], float] = median,
) -> dict[int, float]:
    """Compute the seconds by number of GPUs: of repeats in these states, the average."""
    seconds: dict[int, list[float]] = {}
    for gpus, state, run_seconds in runs:
        if state in states:
            seconds.setdefault(gpus, []).append(run_seconds)
    return {gpus: average(repeats) for gpus, repeats in seconds.items()}


def _fastest(seconds: dict[int, float], least: float, base: int | None = None) -> int:
    """Return the number of GPUs with the fewest seconds, of those that are efficient enough."""
    return min(_efficient(seconds, least, base), key=lambda gpus: seconds[gpus])


def _efficient(seconds: dict[int, float], least: float, base: int | None = None) -> list[int]:
    """Return the numbers of GPUs whose efficiency is at least `least`; if none is, the fewest.

    base: the number of GPUs that the fewest are taken for; without it, what they are.
    """
    fewest = min(seconds)
    work = seconds[fewest] * (base or fewest)
    sizes = [gpus for gpus in seconds if work / (seconds[gpus] * gpus) >= least]
    return sizes or [fewest]


def _done(seconds: dict[int, float]) -> Runs:
    """Make finished runs, one of each number of GPUs."""
    return [(gpus, "done", run_seconds) for gpus, run_seconds in seconds.items()]


_FAILED = [*_done({1: 104, 2: 54, 4: 30, 8: 22}), (1, "done", 100), (8, "failed", 3)]
_SLOW_REPEAT = [*_done({1: 100, 2: 50, 4: 40}), (2, "done", 51), (2, "done", 90)]
_LUCKY_REPEAT = [*_done({1: 100, 2: 55, 4: 50}), (4, "done", 20), (4, "done", 51)]
_MOST_ARE_SLOWER = _done({1: 100, 2: 52, 4: 30, 8: 40})
_TWO_SIZES = _done({1: 183.18, 4: 112.59})
_PUBLISHED = _done({4: 2.66, 8: 1.43, 16: 0.82, 32: 0.5})

_ASK_TRAPS = {
    "Count finished runs only: one that failed early looks fast.": (
        lambda runs, least: _fastest(_typical_seconds(runs, ("done", "failed")), least)
    ),
    "That is the fastest, whatever it costs; first keep those that are efficient enough.": (
        lambda runs, least: _fastest(_typical_seconds(runs), 0)
    ),
    "The fewest GPUs of the table are the base, and need not be one.": (
        lambda runs, least: _fastest(_typical_seconds(runs), least, base=1)
    ),
    "One slow repeat moves a mean; take the median of the repeats.": (
        lambda runs, least: _fastest(_typical_seconds(runs, average=mean), least)
    ),
    "The best repeat may be luck; take the median of the repeats.": (
        lambda runs, least: _fastest(_typical_seconds(runs, average=min), least)
    ),
    "Those are the most GPUs that are efficient enough; of these take the fastest.": (
        lambda runs, least: max(_efficient(_typical_seconds(runs), least))
    ),
}

# ---- the cases: images and seconds, or the wait, of each rank; runs and the least efficiency

_RATES = [((100, 2.0), (50, 2.5)), ((64, 1.0), (64, 2.0), (64, 1.5))]
_WAITS = [((0.5,), (0.25,), (0.0,)), ((0.0,), (1.0,))]
_STUDIES = [
    (_FAILED, 0.8),
    (_PUBLISHED, 0.8),
    (_SLOW_REPEAT, 0.9),
    (_LUCKY_REPEAT, 0.6),
    (_MOST_ARE_SLOWER, 0.2),
    (_TWO_SIZES, 0.5),
]

EXERCISES = [
    OnRanks(job_rate, _RATES, _RATE_TRAPS, call_with_own_case),
    OnRanks(late_rank, _WAITS, _LATE_TRAPS, call_with_own_case),
    Exercise(gpus_to_ask_for, _STUDIES, _ASK_TRAPS),
]
