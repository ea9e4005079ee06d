"""Exercise 1 of notebook 16: a sum over all ranks that goes round a ring of sends and receives.

`exercises.py` takes the judge; the trial runs on every rank.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ddp_helpers.lessons.build_it_yourself.calls import COLLECTIVES, CallLog
from ddp_helpers.lessons.build_it_yourself.judge import (
    close,
    counted,
    judge_on_ranks,
    random_numbers,
    sum_of_all,
)
from ddp_helpers.lessons.exercise import Answer

_LENGTHS = (12, 7, 2)  # equal chunks, unequal ones, and on three ranks an empty one


def _trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Try tensors of several lengths; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in _LENGTHS:
        tensor = random_numbers(rank, length)
        before, total = tensor.clone(), sum_of_all(tensor)
        with log.listening():
            result = answer(tensor)
        yield _wrong_calls(log, length, size) or _wrong_values(result, tensor, before, total)


def _wrong_calls(log: CallLog, length: int, size: int) -> str:
    """Say what is wrong with what a rank called; an empty text if nothing is."""
    if collectives := log.named(*COLLECTIVES):
        return f"it calls dist.{collectives[0].name}, and should use sends and receives only."
    if waits := log.never_waited():
        return (
            f"nothing waits for its {waits[0].text()}: until wait() has returned, a received "
            "tensor has no contents, and a sent one must not be changed."
        )
    sends = len(log.named("send", "isend"))
    if sends == 0:
        return "it sends nothing."
    longest_chunk = -(-length // size)
    if log.numbers_sent() > 2 * (size - 1) * longest_chunk:
        return (
            f"it sends {log.numbers_sent()} numbers of a tensor of {length}. In a ring each "
            f"message holds one chunk, at most {longest_chunk} numbers, and there are "
            f"{counted(2 * (size - 1), 'message')}: have you sent whole tensors?"
        )
    return ""


def _wrong_values(
    result: object,
    tensor: torch.Tensor,
    before: torch.Tensor,
    total: torch.Tensor,
) -> str:
    """Say what is wrong with a rank's tensor; an empty text if nothing is."""
    size = dist.get_world_size()
    if close(tensor, total):
        return ""
    if torch.equal(tensor, before):
        new = " You return a new one, and nobody takes it." * isinstance(result, torch.Tensor)
        return (
            f"the tensor is as it was.{new} Work on chunks of the tensor itself: they are views, "
            "and what is written into a view is in the tensor."
        )
    if close(tensor, total / size):
        return "the tensor holds the mean, and should hold the sum."
    triples = [each.tensor_split(size) for each in (tensor, total, before)]
    chunks = list(zip(*triples, strict=True))
    right = [number for number, (chunk, sums, _) in enumerate(chunks) if close(chunk, sums)]
    if any(close(chunk, sums + own) for chunk, sums, own in chunks if len(chunk)):
        return _ADDED
    return (
        f"of the {size} chunks of {len(tensor)} numbers, {_listed(right)} the sum over all ranks. "
        f"{_SECOND_HALF if len(right) == 1 or (right and len(tensor) < size) else _EACH_ONCE}"
    )


def _listed(numbers: list[int]) -> str:
    """Say which chunks hold something, with the verb."""
    if not numbers:
        return "none holds"
    names = " and ".join(map(str, numbers))
    return f"only number{'s' * (len(numbers) > 1)} {names} hold{'s' * (len(numbers) == 1)}"


_ADDED = (
    "a chunk holds the whole sum and this rank's numbers once more. In the second half whole sums "
    "arrive: they take the place of what is there, and are not added."
)
_SECOND_HALF = (
    "After the first n - 1 steps each rank has one whole sum. In the n - 1 steps after that, "
    "whole sums travel on, and take the place of what is there."
)
_EACH_ONCE = (
    "Each rank's numbers belong in each sum once: in step s of the first half, rank r sends chunk "
    "r - s and adds what arrives to chunk r - s - 1; in the second half nothing is added any more."
)
_HINTS = {
    "which does not exist": "In a ring, after the last rank comes rank 0: (rank + 1) % size.",
    "index out of range": (
        "torch.chunk(tensor, n) may give fewer than n chunks; torch.tensor_split gives n, "
        "some of which may be empty."
    ),
}

JUDGE = judge_on_ranks(_trial, _HINTS)
