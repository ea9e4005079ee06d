"""Exercises of 11 and 11b: save on one rank, rest of an epoch, attempts and saves needed.

`lessons.check` reads EXERCISES, in the learner's process. Functions that "every rank calls" run
on ranks that `on_ranks` forks from it.
"""

import math
import resource
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks


class _Ranks(int):
    """A number of ranks, the first argument of a case; a verdict shows it with its unit."""

    def __repr__(self) -> str:
        return f"{int(self)} ranks"


# ---- save on one rank

_OLD, _NEW = b"old" * 1000, b"new" * 1000
_ROOM = 1024  # bytes that a full disk has room for


def save(path: str, content: bytes) -> bool:
    """Whether rank 0 could write the checkpoint; every rank calls it, and every rank knows."""
    return _save_and_tell(path, content, _write_and_rename)


def _save_and_tell(path: str, content: bytes, write: Callable[[str, bytes], None]) -> bool:
    """Write on rank 0, and tell all ranks whether it went well; every rank calls it."""
    saved = torch.tensor(1)
    if dist.get_rank() == 0:
        try:
            write(path, content)
        except OSError:
            saved = torch.tensor(0)
    dist.broadcast(saved, src=0)
    return bool(saved)


def _write_and_rename(path: str, content: bytes) -> None:
    """Write a file under another name, then rename it; each rank that calls it does."""
    temporary = Path(f"{path}.{dist.get_rank()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _overwrite(path: str, content: bytes) -> None:
    """Write a file in the place of the one before; each rank that calls it does."""
    Path(path).write_bytes(content)


def _save_in_place(path: str, content: bytes) -> bool:
    """A mistake: where the disk is full, the checkpoint of before is lost; every rank calls it."""
    return _save_and_tell(path, content, _overwrite)


def _save_untold(path: str, content: bytes) -> bool:
    """A mistake: rank 0 does not tell how it went; every rank calls it."""
    return _save_on_every_rank(path, content) if dist.get_rank() == 0 else True


def _save_without_catching_errors(path: str, content: bytes) -> bool:
    """A mistake: where the disk is full, rank 0 leaves, and the others wait for it."""
    if dist.get_rank() == 0:
        _write_and_rename(path, content)
    dist.barrier()
    return True


def _save_on_every_rank(path: str, content: bytes) -> bool:
    """A mistake: every rank writes, and returns how that went for itself."""
    try:
        _write_and_rename(path, content)
    except OSError:
        return False
    return True


def _try_to_save(answer: Callable[[str, bytes], bool], size: int, disk: str) -> dict[str, object]:
    """Call an answer on so many ranks, where a checkpoint is, and return what came of it.

    returned: what each rank returned, or how it failed; checkpoint: old, new or damaged.
    disk: "full disk", where rank 0 is to have no room for the new one.
    """
    returned: object
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        path.write_bytes(_OLD)

        def call_answer() -> object:
            if disk == "full disk" and dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM, _ROOM))
            return answer(str(path), _NEW)

        try:
            returned = on_ranks(size, call_answer)
        except NotImplementedError:
            raise
        except (OSError, RuntimeError) as error:
            returned = f"{type(error).__name__}: {error}"
        content = path.read_bytes() if path.exists() else b""
    checkpoint = {_OLD: "old", _NEW: "new"}.get(content, "damaged")
    return {"returned": returned, "checkpoint": checkpoint}


_SAVE_CASES = [
    (_Ranks(2), "room on the disk"),
    (_Ranks(2), "full disk"),
    (_Ranks(3), "full disk"),
]
_SAVE_TRAPS = {
    "The one before is lost: write to another name, and rename at the end.": _save_in_place,
    "Only rank 0 knows how it went: let it tell the others, with a collective.": _save_untold,
    "Rank 0 leaves with an error, and the others wait for it: "
    "catch OSError, and tell them.": _save_without_catching_errors,
    "Every rank writes: one is enough, and they may write over each other.": _save_on_every_rank,
}


# ---- the rest of an epoch

_SAMPLES = 24  # of an epoch, of all ranks together


def rest(sampler: DistributedSampler, epoch: int, done: int) -> list[int]:
    """Return the samples of an epoch that this rank has still to do; every rank calls it.

    done: samples that all ranks together have done.
    """
    return _samples(sampler, epoch)[done // dist.get_world_size() :]


def _samples(sampler: DistributedSampler, epoch: int) -> list[int]:
    """Return this rank's samples of an epoch, in their order; every rank calls it."""
    sampler.set_epoch(epoch)
    return list(sampler)


def _rest_after_all_done(sampler: DistributedSampler, epoch: int, done: int) -> list[int]:
    """A mistake: each rank is said to have done what all have done together."""
    return _samples(sampler, epoch)[done:]


def _rest_of_first_epoch(sampler: DistributedSampler, epoch: int, done: int) -> list[int]:
    """A mistake: the order is that of another epoch."""
    return list(sampler)[done // dist.get_world_size() :]


def _done_already(sampler: DistributedSampler, epoch: int, done: int) -> list[int]:
    """A mistake: the samples that this rank has done."""
    return _samples(sampler, epoch)[: done // dist.get_world_size()]


def _try_rest(answer: Callable[..., list[int]], size: int, epoch: int, done: int) -> list:
    """Call an answer with a sampler on so many ranks, and return what each rank returns."""
    dataset = TensorDataset(torch.arange(_SAMPLES))
    return on_ranks(size, lambda: list(answer(DistributedSampler(dataset), epoch, done)))


_REST_CASES = [(_Ranks(2), 1, 8), (_Ranks(2), 3, 0), (_Ranks(3), 2, 12)]
_REST_TRAPS = {
    "`done` counts the samples of all ranks: each has done its share of it.": _rest_after_all_done,
    "That is the order of another epoch: `set_epoch` comes first.": _rest_of_first_epoch,
    "That is what is done already; asked is what is left.": _done_already,
}


# ---- attempts needed


def attempts_needed(work: float, limit: float, start: float, grace: float) -> int:
    """Return the number of attempts, if the warning always comes in time and nothing goes wrong.

    work, limit (of an attempt), start and grace (from the warning to the end) have one unit.
    """
    return math.ceil(work / (limit - start - grace))


def _attempts_without_loss(work: float, limit: float, start: float, grace: float) -> int:
    """A mistake: all of an attempt is work."""
    return math.ceil(work / limit)


def _attempts_rounded(work: float, limit: float, start: float, grace: float) -> int:
    """A mistake: a small part of an attempt is none."""
    return round(work / (limit - start - grace))


def _attempts_rounded_down_plus_one(work: float, limit: float, start: float, grace: float) -> int:
    """A mistake: one attempt too many where the work fits exactly."""
    return int(work / (limit - start - grace)) + 1


_NEEDED_CASES = [
    (24, 4, 0.25, 0.25),
    (3, 4, 0.25, 0.25),
    (3.75, 4, 0.25, 0.25),
    (7, 4, 0.25, 0.25),
    (24, 2, 0.5, 0.25),
]
_NEEDED_TRAPS = {
    "Start and warning are lost to the work, in each attempt.": _attempts_without_loss,
    "A part of an attempt is an attempt: round up.": _attempts_rounded,
    "If the work fits exactly, no further attempt is needed: "
    "round up, instead of adding one.": _attempts_rounded_down_plus_one,
}


# ---- steps between saves


def steps_between_saves(cost: float, between: float, step: float) -> int:
    """Return the best value of --checkpoint-every, at least 1.

    cost: of a save; between: from one failure to the next; step: of a step; all in seconds.
    """
    return max(1, round(_best_interval(cost, between) / step))


def _best_interval(cost: float, between: float) -> float:
    """Return the seconds from save to save that lose the least time to saves and failures."""
    return math.sqrt(2 * cost * between)


def _seconds_between_saves(cost: float, between: float, step: float) -> int:
    """A mistake: the interval in seconds."""
    return round(_best_interval(cost, between))


def _steps_without_half(cost: float, between: float, step: float) -> int:
    """A mistake: without the 2 under the root."""
    return max(1, round(math.sqrt(cost * between) / step))


def _steps_from_0(cost: float, between: float, step: float) -> int:
    """A mistake: less than one step."""
    return round(_best_interval(cost, between) / step)


_BETWEEN_CASES = [(2.0, 86_400.0, 0.5), (30.0, 3600.0, 1.5), (0.1, 3600.0, 60.0)]
_BETWEEN_TRAPS = {
    "That is the interval in seconds; divide it by the seconds of a step.": _seconds_between_saves,
    "The formula has a 2 under the root: half an interval is lost on average.": _steps_without_half,
    "No less than one step: nothing can be saved in the middle of one.": _steps_from_0,
}


EXERCISES = [
    OnRanks(save, _SAVE_CASES, _SAVE_TRAPS, _try_to_save),
    OnRanks(rest, _REST_CASES, _REST_TRAPS, _try_rest),
    Exercise(attempts_needed, _NEEDED_CASES, _NEEDED_TRAPS),
    Exercise(steps_between_saves, _BETWEEN_CASES, _BETWEEN_TRAPS),
]
