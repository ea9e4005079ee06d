"""Judge a learner's function on two and on three real ranks, and put into words what went wrong.

The exercises of notebook 16 are made with it. It is called in the learner's process; the trials
run on ranks that are forked from it.
"""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.build_it_yourself.calls import (
    COLLECTIVES,
    Call,
    CallLog,
    RankState,
    read_log,
)
from ddp_helpers.lessons.exercise import Answer

SIZES = (2, 3)
Trial = Callable[[Answer, CallLog], Iterator[str]]  # for each case, the mistake, or an empty text

_CLOSED = "by peer"  # what gloo says on a rank whose partner is gone


def judge_on_ranks(trial: Trial, hints: Mapping[str, str]) -> Callable[[Answer], list[str]]:
    """Make the judge of an exercise from what every rank tries and compares.

    hints: a part of an error's text, and the sentence that helps who meets this error.
    """

    def judge(answer: Answer) -> list[str]:
        if dist.is_initialized():
            return ["run this cell without `%%ranks`: the judge starts ranks of its own"]
        for size in SIZES:
            if mistake := _try_on(size, trial, answer, hints):
                return [f"on {size} ranks: {mistake}"]
        return []

    return judge


def _try_on(size: int, trial: Trial, answer: Answer, hints: Mapping[str, str]) -> str:
    """Return the first mistake of an answer on so many ranks; an empty text if there is none."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank{rank}" for rank in range(size)]

        def work() -> str:
            # Newer torch has other names for two collectives; the older ones do the same.
            warnings.simplefilter("ignore", FutureWarning)
            log = CallLog(paths[dist.get_rank()])
            return _first_mistake(trial(answer, log))

        try:
            return on_ranks(size, work)[0]
        except NotImplementedError:
            raise
        except Exception as error:
            states = [read_log(path) for path in paths]
            return _failure(error, states, hints)


def _first_mistake(mistakes: Iterable[str]) -> str:
    """Return the mistake of the lowest rank in the first case that has any; all ranks call it.

    After each case the ranks compare, so that all stop at the same one.
    """
    for mistake in mistakes:
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, mistake)
        for rank, text in enumerate(everyone):
            if text:
                return f"rank {rank}: {text}"
    return ""


def _failure(error: Exception, states: list[RankState], hints: Mapping[str, str]) -> str:
    """Say why the ranks did not come to an end: who waits for whom, or the error, and its hint."""
    if isinstance(error, TimeoutError):
        return _who_waits(states)
    text = str(error).splitlines()[0] if str(error) else ""
    difference = _first_difference(states)
    if difference and (_CLOSED in text or isinstance(error, ChildProcessError)):
        return difference
    if isinstance(error, ChildProcessError) and signal.SIGSEGV.name in text:
        text += ": it read memory that was no longer there"
    known = [hint for part, hint in hints.items() if part in str(error)]
    return " ".join([f"{type(error).__name__}: {text.rstrip('.')}.", *known[:1]])


def _who_waits(states: list[RankState]) -> str:
    """Say for each rank where it waited when the time was up, and what follows from it."""
    if not any(state.waiting for state in states):
        return "the time was up, and no rank was in a call of torch.distributed. Does a loop end?"
    places = [f"rank {rank} {_place(state)}" for rank, state in enumerate(states)]
    sentence = f"the ranks wait for each other: {'; '.join(places)}."
    waiting = [state.waiting.name for state in states if state.waiting and not state.in_wait]
    if waiting.count("send") == len(states):
        return f"{sentence} {_ALL_SEND}"
    if "send" in waiting:
        return f"{sentence} {_ONE_SENDS}"
    if dropped := [call for state in states for call in state.dropped]:
        return f"{sentence} Nothing waits for the {dropped[0].text()}. {_DROPPED}"
    if set(waiting) == {"recv"} and len(waiting) == len(states):
        return f"{sentence} {_ALL_RECEIVE}"
    somebody_returned = any(state.returned for state in states)
    reason = _RETURNED_EARLY if somebody_returned else _NOBODY_COMES
    difference = _first_difference(states) or reason
    return f"{sentence} {difference[0].upper()}{difference[1:]}"


_ALL_SEND = (
    "Nobody comes to recv: send returns only when the receiver has taken the message. "
    "Begin with isend, and wait for it after the recv."
)
_ONE_SENDS = (
    "send returns only when the receiver has taken the message, and the receiver is elsewhere: "
    "isend lets the sender go on to what the other needs."
)
_DROPPED = (
    "isend and irecv return at once: keep what they return, and call its wait(), or the message "
    "may never be sent or received."
)
_ALL_RECEIVE = "All wait for a message that nobody has begun to send: isend comes before recv."
_RETURNED_EARLY = (
    "A rank that has returned sends and receives nothing more: has it made the call for which the "
    "other waits?"
)
_NOBODY_COMES = "Somebody waits for a message, or a collective, to which the other never comes."


def _place(state: RankState) -> str:
    """Say where a rank is: in a call, in the wait for one, or in none."""
    if state.returned:
        return "has returned"
    if state.waiting is None:
        return "is in no call of torch.distributed"
    return f"is in {'wait() for ' * state.in_wait}{state.waiting.text()}"


def _first_difference(states: list[RankState]) -> str:
    """Say at which collective two ranks first disagree; an empty text if they do not.

    Sends and receives differ by their nature, and are left out.
    """
    by_rank = [[call for call in state.calls if call.name in COLLECTIVES] for state in states]
    for rank, calls in enumerate(by_rank[1:], 1):
        if difference := difference_of_calls(by_rank[0], calls, rank):
            return difference
    return ""


def difference_of_calls(first: list[Call], other: list[Call], rank: int) -> str:
    """Say where the collectives of rank 0 and another rank first differ; an empty text if never."""
    longest = max(len(first), len(other))
    for number in range(longest):
        pair = [calls[number] if number < len(calls) else None for calls in (first, other)]
        if pair[0] != pair[1]:
            texts = [call.text() if call else "nothing more" for call in pair]
            return (
                f"the ranks disagree at collective {number + 1}: rank 0 calls {texts[0]}, and "
                f"rank {rank} {texts[1]}. All ranks must call the same ones in the same order."
            )
    return ""


# ---- what several trials use


def close(result: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of sums in another order."""
    return result.shape == expected.shape and torch.allclose(result, expected, atol=1e-9)


def random_numbers(seed: int, *shape: int) -> Tensor:
    """Make double-precision numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sum_of_all(tensor: Tensor) -> Tensor:
    """Compute the sum of a tensor over the ranks in a new one; every rank calls it."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, as in `1 call` and `2 calls`."""
    return f"{number} {noun}{'s' * (number != 1)}"
