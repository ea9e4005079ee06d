"""Exercises of notebooks 10 and 10b: two in plain Python, and two whose answers run on real ranks.

`lessons.check` asks them for verdicts. The last two are trials, which run on every rank and have
the name of their exercise; the others run in the driver process.
"""

from collections.abc import Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks

# ---- what ended a process


def killed_by(status: int) -> int:
    """Return the number of the signal that ended a process; 0 if none did.

    status: as Python or a shell reports it.
    """
    if status < 0:
        return -status
    return status - 128 if status > 128 else 0


def _killed_by_in_a_shell(status: int) -> int:
    """A mistake: Python's negative statuses are not signals."""
    return status - 128 if status > 128 else 0


def _killed_by_in_python(status: int) -> int:
    """A mistake: a shell's statuses above 128 are not signals."""
    return max(0, -status)


def _killed_by_any_status(status: int) -> int:
    """A mistake: every status is a signal."""
    return abs(status) % 128


_KILLED_TRAPS = {
    "Python reports a signal as a negative number; a shell adds 128 to it.": _killed_by_in_a_shell,
    "That is Python's way; a shell adds 128 to the signal's number.": _killed_by_in_python,
    "A small status such as 1 is the program's own, not a signal.": _killed_by_any_status,
}


# ---- where the calls of ranks differ


def where_they_part(calls: list[list[str]]) -> int | None:
    """Return the first call in which not all ranks enter the same collective; None if all agree.

    calls: for each rank, the collectives that it enters. Calls are counted from 0.
    """
    for number, names in enumerate(zip_longest(*calls)):
        if len(set(names)) > 1:
            return number
    return None


def _cut_short(calls: list[list[str]]) -> int | None:
    """A mistake: what comes after the end of a rank is left out."""
    shortest = min(map(len, calls))
    return where_they_part([names[:shortest] for names in calls])


_BROADCAST_FIRST = ["broadcast", "all_reduce"]
_PART_CASES = [
    ([["all_reduce", "barrier"], ["all_reduce", "barrier"]],),
    ([["all_reduce"] * 6, ["all_reduce"] * 5],),
    ([["all_reduce"] * 2, ["all_reduce"] * 3],),
    ([_BROADCAST_FIRST, _BROADCAST_FIRST, ["broadcast", "broadcast"]],),
    ([["all_reduce", "all_gather", "barrier"], ["all_gather", "all_reduce", "barrier"]],),
]
_PART_TRAPS = {
    "A rank that has ended enters nothing: look past the end of the shortest list.": _cut_short,
}


# ---- the same weights on all ranks


def same_weights(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Check the answer on whether each rank was given the weights of the others."""
    for weights in (
        [[1.0, 2.0, 3.0]] * 3,
        [[1.0, 2.0, 3.0], [1.0, 2.0, 4.0], [1.0, 2.0, 3.0]],
        [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]],
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0000002], [1.0, 2.0, 3.0]],  # the last bit of a float32
    ):
        weights, own = weights[: dist.get_world_size()], weights[dist.get_rank()]
        model = torch.nn.Linear(2, 1)
        vector_to_parameters(torch.tensor(own), model.parameters())
        known = {_NOT_TOLD: own == weights[0], _SUMS: sum(own) == sum(weights[0])}
        expected = all(each == own for each in weights)
        yield Comparison(f"whether {weights} are the same", answer(model), expected, known)
        after = parameters_to_vector(model.parameters())
        yield Comparison("the weights, which it should only read", after, torch.tensor(own))


_NOT_TOLD = "A rank that equals rank 0 must learn of those that do not: use one more collective."
_SUMS = "Different weights can have the same sum: compare all of them."


# ---- the step at which all ranks stop


def stop_step(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the first vote after any rank got the signal to stop."""
    for told, every in (([3, 4, 5], 1), ([7, 5, 9], 4), ([8, 9, 12], 4), ([0, 5, 4], 3)):
        told = told[: dist.get_world_size()]
        own = told[dist.get_rank()]
        known = {_ALONE: -(-own // every) * every, _VOTES: min(told)}
        what = f"the step, of ranks told at {told}, a vote every {every}"
        yield Comparison(what, answer(own, every), -(-min(told) // every) * every, known)


_ALONE = "The ranks leave at different steps: the others wait for a rank that leaves alone."
_VOTES = "They vote only in the steps 0, `every`, twice `every`, and so on."


EXERCISES = [
    Exercise(killed_by, [(137,), (-9,), (-11,), (134,), (1,), (0,)], _KILLED_TRAPS),
    Exercise(where_they_part, _PART_CASES, _PART_TRAPS),
    on_real_ranks(same_weights),
    on_real_ranks(stop_step),
]
