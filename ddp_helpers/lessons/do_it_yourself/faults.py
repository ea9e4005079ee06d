"""A script with faults that no error tells of: the course's own, with a few pieces of its text replaced."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ddp_helpers.notebook.scripts import Script

CLOSE = 1e-4  # weights that differ by less are equal, to the rounding of some steps in float32


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference of two weights."""
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=float("inf"))


def ordered(ranks: list[dict], alone: dict) -> bool:
    """Whether each rank was shown the training images in a new order in every epoch."""
    return all(len(set(map(tuple, rank["train"]))) == len(alone["train"]) for rank in ranks)


def tested(ranks: list[dict], alone: dict) -> bool:
    """Whether the ranks have tested each image once, in every epoch."""
    if any(len(rank["test"]) != len(alone["test"]) for rank in ranks):
        return False
    passes = zip(*(rank["test"] for rank in ranks), strict=True)
    return all(Counter(chain.from_iterable(shards)) == Counter(alone["test"][0]) for shards in passes)


def equal(ranks: list[dict], alone: dict) -> bool:
    """Whether the ranks have ended with the same weights."""
    return all(apart(rank["weights"], ranks[0]["weights"]) < CLOSE for rank in ranks)


@dataclass(frozen=True)
class Fault:
    """A fault: the right text and the wrong one, a predicate on runs that detects it, and the hint to give then."""

    right: str
    wrong: str
    mended: Callable[[list[dict], dict], bool]  # from what each rank has seen, and what one process has
    found: str
    still: str


FAULTS = (
    Fault(
        "        sampler.set_epoch(epoch)  # a new order each epoch\n        model.train()\n",
        "        model.train()\n",
        ordered,
        "each epoch has an order of its own",
        "the second epoch repeats the order of the first, on every rank: who tells the sampler which epoch it is?",
    ),
    Fault(
        "range(rank, len(test_set), world_size))  # each sample on one rank, once",
        "range(0, len(test_set), world_size))  # a share for each rank",
        tested,
        "the ranks test each image once",
        "the ranks together do not test each image once: print which images each of them takes",
    ),
    Fault(
        "one_pass(ddp_model, train_batches, args, optimizer",
        "one_pass(model, train_batches, args, optimizer",
        equal,
        "the ranks end with the same weights",
        "the ranks end with different weights, so nobody averages gradients: which object do the images go through?",
    ),
)


def planted() -> str:
    """The faulty script. Raises ValueError where a fault has no place, or several, in the course's script."""
    text = Script("mnist_ddp").text()
    for fault in FAULTS:
        if text.count(fault.right) != 1:
            raise ValueError(f"{fault.right.strip()!r} stands {text.count(fault.right)} times in mnist_ddp, not once")
        text = text.replace(fault.right, fault.wrong)
    return text


def write(path: Path) -> Path:
    """Write the faulty script to `path`; the learner's process calls it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(planted())
    return path
