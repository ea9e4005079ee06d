"""The exercises of notebook 09: the job's rate, the late rank, the number of GPUs to request.

`lessons.check` asks them for verdicts. The first two are trials, which run on every rank and have
the name of their exercise; the last runs in the driver process.
"""

from collections.abc import Iterator
from operator import truediv
from statistics import mean, median

import torch.distributed as dist

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks

Runs = list[tuple[int, str, float]]  # for each run: its GPUs, its state and its seconds

# ---- the rate of the job


def job_rate(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the images of all ranks, divided by the seconds of the slowest."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for images, seconds in (([100, 50, 64], [2.0, 2.5, 1.0]), ([64, 64, 64], [1.0, 2.0, 1.5])):
        images, seconds = images[:size], seconds[:size]
        known = {
            "That is this rank's own speed; count the images of all ranks.": (
                images[rank] / seconds[rank]
            ),
            "The ranks work at the same time, and the job takes as long as the slowest: "
            "MAX, not a sum.": sum(images) / sum(seconds),
            "A rank that finishes early waits: divide all images by the longest seconds, once.": (
                sum(map(truediv, images, seconds))
            ),
        }
        rate = answer(images[rank], seconds[rank])
        what = f"the job's rate, with {images} images in {seconds} seconds"
        yield Comparison(what, rate, sum(images) / max(seconds), known)


# ---- the late rank


def late_rank(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the rank that has waited least, since it came last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for waits in ([0.5, 0.25, 0.0], [0.0, 1.0, 2.0]):
        waits = waits[:size]
        known = {
            "That rank waited longest, so it came first; the late one waits least.": (
                waits.index(max(waits))
            ),
            "That is the least wait, not the rank that has it.": min(waits),
            "Each rank names itself: gather the waits of all ranks first.": rank,
        }
        late = waits.index(min(waits))
        yield Comparison(f"the late rank, with waits {waits}", answer(waits[rank]), late, known)


# ---- the number of GPUs to request


def gpus_to_ask_for(runs: Runs, least: float) -> int:
    """Return the fastest number of GPUs whose efficiency against the fewest is at least `least`."""
    seconds = _efficient(runs, least)
    return min(seconds, key=lambda gpus: seconds[gpus])


def _efficient(runs: Runs, least: float) -> dict[int, float]:
    """Map the numbers of GPUs that are efficient enough, or else the fewest, to their seconds.

    The seconds are the median of finished repeats.
    """
    repeats: dict[int, list[float]] = {}
    for gpus, state, run_seconds in runs:
        if state == "done":
            repeats.setdefault(gpus, []).append(run_seconds)
    seconds = {gpus: median(repeats[gpus]) for gpus in repeats}
    fewest = min(seconds)
    work = fewest * seconds[fewest]
    efficient = {gpus: each for gpus, each in seconds.items() if work / (gpus * each) >= least}
    return efficient or {fewest: seconds[fewest]}


def _mean_repeats(runs: Runs) -> Runs:
    """Replace each run with the mean of the finished repeats."""
    done = [run for run in runs if run[1] == "done"]
    return [
        (gpus, "done", mean(seconds for other, _, seconds in done if other == gpus))
        for gpus, *_ in done
    ]


def _done(seconds: dict[int, float]) -> Runs:
    """Make finished runs, one for each number of GPUs."""
    return [(gpus, "done", run_seconds) for gpus, run_seconds in seconds.items()]


_FAILED = [*_done({1: 104, 2: 54, 4: 30, 8: 22}), (1, "done", 100), (8, "failed", 3)]
_SLOW_REPEAT = [*_done({1: 100, 2: 50, 4: 40}), (2, "done", 51), (2, "done", 90)]
_LUCKY_REPEAT = [*_done({1: 100, 2: 55, 4: 50}), (4, "done", 20), (4, "done", 51)]
_MOST_ARE_SLOWER = _done({1: 100, 2: 52, 4: 30, 8: 40})
_TWO_SIZES = _done({1: 183.18, 4: 112.59})
_PUBLISHED = _done({4: 2.66, 8: 1.43, 16: 0.82, 32: 0.5})

_TOO_LARGE_FOR_ONE = [(1, "failed", 2), *_done({2: 50, 4: 30})]

_ASK_TRAPS = {
    "Count finished runs only: one that failed early looks fast.": (
        lambda runs, least: gpus_to_ask_for([(gpus, "done", run) for gpus, _, run in runs], least)
    ),
    "The fewest GPUs of the table are the base, and need not be one.": (
        lambda runs, least: gpus_to_ask_for(runs, least * min(gpus for gpus, *_ in runs))
    ),
    "One slow repeat moves a mean; take the median of the repeats.": (
        lambda runs, least: gpus_to_ask_for(_mean_repeats(runs), least)
    ),
    "Those are the most GPUs that are efficient enough; choose the fastest of these.": (
        lambda runs, least: max(_efficient(runs, least))
    ),
}

# ---- the cases: runs, and the least efficiency

_STUDIES = [
    (_FAILED, 0.8),
    (_PUBLISHED, 0.8),
    (_SLOW_REPEAT, 0.9),
    (_LUCKY_REPEAT, 0.6),
    (_MOST_ARE_SLOWER, 0.2),
    (_TWO_SIZES, 0.5),
    (_TOO_LARGE_FOR_ONE, 0.8),
]

EXERCISES = [
    on_real_ranks(job_rate),
    on_real_ranks(late_rank),
    Exercise(gpus_to_ask_for, _STUDIES, _ASK_TRAPS),
]
