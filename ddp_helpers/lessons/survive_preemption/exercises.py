"""Exercises of 11 and 11b: save on one rank, rest of an epoch, attempts and saves needed.

`lessons.check` asks them for verdicts. The first two are trials, which run on every rank and have
the name of their exercise; the others run in the driver process.
"""

import math
import resource
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks

# ---- save on one rank

_OLD, _NEW = b"old" * 100_000, b"new" * 100_000
_ROOM = 100_000  # bytes that still fit on a full disk


def save(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare each rank's result of a save, and the contents of the file after it.

    First only rank 0 has room on its disk, then only the others have.
    """
    rank = dist.get_rank()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        path = Path(folders[0], "checkpoint.pt")
        for goes_well, hint in ((True, _ALL_WRITE), (False, _UNTOLD)):
            is_full = (rank == 0) != goes_well
            if rank == 0:
                path.write_bytes(_OLD)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM if is_full else most, most))
            try:
                told = answer(str(path), _NEW)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            where = f"with {'room' if goes_well else 'no room'} on rank 0's disk"
            yield Comparison(f"{where}, what save returns", told, goes_well, {hint: not is_full})
            content = {_OLD: "old", _NEW: "new"}.get(path.read_bytes(), "damaged")
            right = "new" if goes_well else "old"
            yield Comparison(f"{where}, the checkpoint", content, right, {_LOST: "damaged"})


_ALL_WRITE = "Every rank reports its own save: let only rank 0 write, and tell the others."
_UNTOLD = "Only rank 0 knows the result: let it tell the others, with a collective."
_LOST = "The previous checkpoint is lost: write to a different name, and rename at the end."
_SAVE_ERRORS = {
    "File too large": (
        "A rank leaves with an error, and the others wait for it: catch OSError on rank 0, and "
        "tell them."
    )
}

# ---- the rest of an epoch


def rest(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with this rank's samples of an epoch, without those that are done."""
    size, dataset = dist.get_world_size(), TensorDataset(torch.arange(24))
    for epoch, done in ((1, 12), (3, 0), (2, 18)):
        sampler: DistributedSampler = DistributedSampler(dataset)
        of_first_epoch = list(sampler)
        sampler.set_epoch(epoch)
        samples = list(sampler)
        known = {
            "`done` counts the samples of all ranks: each has done its part.": (samples[done:]),
            "That is the order of a different epoch: call `set_epoch` first.": (
                of_first_epoch[done // size :]
            ),
            "Those samples are done: return the rest.": samples[: done // size],
        }
        left: Any = answer(DistributedSampler(dataset), epoch, done)
        yield Comparison("what it returns", type(left).__name__, "list")
        what = f"the rest of epoch {epoch}, after {done} samples of all ranks"
        yield Comparison(what, list(left), samples[done // size :], known)


# ---- attempts needed


def attempts_needed(work: float, limit: float, start: float, grace: float) -> int:
    """Return the number of attempts, if the warning always comes in time and nothing fails.

    work, limit (of an attempt), start and grace (from the warning to the end) have one unit.
    """
    return math.ceil(work / (limit - start - grace))


_NEEDED_CASES = [
    (24, 4, 0.25, 0.25),
    (3, 4, 0.25, 0.25),
    (3.75, 4, 0.25, 0.25),
    (7, 4, 0.25, 0.25),
    (24, 2, 0.5, 0.25),
]
_NEEDED_TRAPS = {
    "Start and warning take time from the work in each attempt.": (
        lambda work, limit, start, grace: attempts_needed(work, limit, 0, 0)
    ),
    "A part of an attempt is an attempt: round up.": (
        lambda work, limit, start, grace: round(work / (limit - start - grace))
    ),
    "If the work fits exactly, no further attempt is needed: round up, instead of adding one.": (
        lambda work, limit, start, grace: int(work / (limit - start - grace)) + 1
    ),
}


# ---- steps between saves


def steps_between_saves(cost: float, between: float, step: float) -> int:
    """Return the best value of --checkpoint-every, at least 1.

    cost: of a save; between: from one failure to the next; step: of a step; all in seconds.
    """
    return max(1, round(math.sqrt(2 * cost * between) / step))


_BETWEEN_CASES = [
    (2.0, 86_400.0, 0.5),
    (30.0, 3600.0, 1.5),
    (0.1, 3600.0, 60.0),
    (2.0, 3600.0, 1.0),
    (5.0, 3600.0, 1.0),
]
_BETWEEN_TRAPS = {
    "That is the interval in seconds; divide it by the seconds of a step.": (
        lambda cost, between, step: steps_between_saves(cost, between, 1)
    ),
    "Return at least one step: nothing can be saved in the middle of one.": (
        lambda cost, between, step: round(math.sqrt(2 * cost * between) / step)
    ),
}


EXERCISES = [
    on_real_ranks(save, _SAVE_ERRORS),
    on_real_ranks(rest),
    Exercise(attempts_needed, _NEEDED_CASES, _NEEDED_TRAPS),
    Exercise(steps_between_saves, _BETWEEN_CASES, _BETWEEN_TRAPS),
]
