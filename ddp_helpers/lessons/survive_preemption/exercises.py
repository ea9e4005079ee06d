"""Exercises of notebook 11: save on one rank, the rest of an epoch, attempts needed, steps between saves."""

import math
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks


class Ranks(int):
    """A number of ranks, the first argument of a case."""

    def __repr__(self) -> str:
        return f"{int(self)} ranks"


OLD, NEW, ROOM = b"old" * 1000, b"new" * 1000, 1024  # bytes that a full disk has room for


def saving(answer: Callable, size: int, disk: str) -> dict:
    """What each rank returns, and what the checkpoint holds then; there was an old one before."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        path.write_bytes(OLD)

        def work() -> object:
            if disk == "full disk" and dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
            return answer(str(path), NEW)

        try:
            returned = on_ranks(size, work)
        except NotImplementedError:
            raise
        except (OSError, RuntimeError) as error:
            returned = f"{type(error).__name__}: {error}"
        holds = path.read_bytes() if path.exists() else b""
        return {"returned": returned, "checkpoint": {OLD: "old", NEW: "new"}.get(holds, "damaged")}


def save(path: str, content: bytes, straight: bool = False) -> bool:
    """Whether rank 0 could write the checkpoint; every rank calls it, and every rank knows."""
    saved = torch.tensor(1)
    if dist.get_rank() == 0:
        try:
            save_alone(path, content, straight)
        except OSError:
            saved = torch.tensor(0)
    dist.broadcast(saved, src=0)
    return bool(saved)


def save_alone(path: str, content: bytes, straight: bool = False) -> bool:
    """Write under another name, and rename; each rank that calls it does."""
    written = Path(path if straight else f"{path}.{dist.get_rank()}")
    written.write_bytes(content)
    written.replace(path)
    return True


def save_untold(path: str, content: bytes, everyone: bool = False) -> bool:
    """A mistake: whoever writes does not say how it went."""
    if everyone or dist.get_rank() == 0:
        try:
            return save_alone(path, content)
        except OSError:
            return False
    return True


def save_uncaught(path: str, content: bytes) -> bool:
    """A mistake: where the disk is full, rank 0 leaves, and the others wait for it."""
    if dist.get_rank() == 0:
        save_alone(path, content)
    dist.barrier()
    return True


SAVE_TRAPS = {
    "The one before is lost: write to another name, and rename at the end.": partial(save, straight=True),
    "Only rank 0 knows how it went: let it tell the others, with a collective.": save_untold,
    "Rank 0 leaves with an error, and the others wait for it: catch OSError, and tell them.": save_uncaught,
    "Every rank writes: one is enough, and they may write over each other.": partial(save_untold, everyone=True),
}


def sharing(answer: Callable, size: int, epoch: int, done: int) -> list:
    """What is left for each rank, of an epoch of 24 samples."""
    return on_ranks(size, lambda: list(answer(DistributedSampler(range(24)), epoch, done)))


def rest(sampler: DistributedSampler, epoch: int, done: int) -> list[int]:
    """The samples that this rank has still to do, after all ranks together have done the first `done` of the epoch."""
    sampler.set_epoch(epoch)
    return list(sampler)[done // dist.get_world_size() :]


REST_TRAPS = {
    "`done` counts the samples of all ranks: each has done its share of it.": (
        lambda sampler, epoch, done: sampler.set_epoch(epoch) or list(sampler)[done:]
    ),
    "That is the order of another epoch: `set_epoch` comes first.": (
        lambda sampler, epoch, done: list(sampler)[done // dist.get_world_size() :]
    ),
    "That is what is done already; asked is what is left.": (
        lambda sampler, epoch, done: sampler.set_epoch(epoch) or list(sampler)[: done // dist.get_world_size()]
    ),
}


def attempts_needed(work: float, limit: float, start: float, grace: float) -> int:
    """The number of attempts, if the warning always comes in time and nothing else goes wrong."""
    return math.ceil(work / (limit - start - grace))


NEEDED_TRAPS = {
    "Start and warning are lost to the work, in each attempt.": lambda work, limit, *lost: math.ceil(work / limit),
    "A part of an attempt is an attempt: round up.": lambda work, limit, *lost: round(work / (limit - sum(lost))),
    "If the work fits exactly, no further attempt is needed: round up, instead of adding one.": (
        lambda work, limit, *lost: int(work / (limit - sum(lost))) + 1
    ),
}


def steps_between_saves(cost: float, between: float, step: float) -> int:
    """The best value of --checkpoint-every, at least 1. All arguments are in seconds."""
    return max(1, round(math.sqrt(2 * cost * between) / step))


BETWEEN_TRAPS = {
    "That is the interval in seconds; divide it by the seconds of a step.": (
        lambda cost, between, step: round(math.sqrt(2 * cost * between))
    ),
    "The formula has a 2 under the root: half an interval is lost on average.": (
        lambda cost, between, step: max(1, round(math.sqrt(cost * between) / step))
    ),
    "No less than one step: nothing can be saved in the middle of one.": (
        lambda cost, between, step: round(math.sqrt(2 * cost * between) / step)
    ),
}

SAVES = [(Ranks(2), "room on the disk"), (Ranks(2), "full disk"), (Ranks(3), "full disk")]
NEEDED = [(24, 4, 0.25, 0.25), (3, 4, 0.25, 0.25), (3.75, 4, 0.25, 0.25), (7, 4, 0.25, 0.25), (24, 2, 0.5, 0.25)]
EXERCISES = [
    OnRanks(save, SAVES, SAVE_TRAPS, saving),
    OnRanks(rest, [(Ranks(2), 1, 8), (Ranks(2), 3, 0), (Ranks(3), 2, 12)], REST_TRAPS, sharing),
    Exercise(attempts_needed, NEEDED, NEEDED_TRAPS),
    Exercise(steps_between_saves, [(2.0, 86_400.0, 0.5), (30.0, 3600.0, 1.5), (0.1, 3600.0, 60.0)], BETWEEN_TRAPS),
]
