"""Exercises of notebooks 10 and 10b: two in plain Python, and two whose answers run on real ranks.

`lessons.check` reads EXERCISES, in the learner's process. Functions that "every rank calls" run
on ranks that `on_ranks` forks from it.
"""

from collections.abc import Callable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case, on_ranks

# ---- what ended a process


def killed_by(status: int) -> int:
    """Return the number of the signal that ended a process; 0 if none did.

    status: as Python reports it, or a shell.
    """
    if status < 0:
        return -status
    return status - 128 if status > 128 else 0


def _killed_by_in_a_shell(status: int) -> int:
    """A mistake: Python's negative statuses are no signals."""
    return status - 128 if status > 128 else 0


def _killed_by_in_python(status: int) -> int:
    """A mistake: a shell's statuses above 128 are no signals."""
    return max(0, -status)


def _killed_by_any_status(status: int) -> int:
    """A mistake: every status is a signal."""
    return abs(status) % 128


_KILLED_TRAPS = {
    "Python reports a signal as a negative number; a shell adds 128 to it.": _killed_by_in_a_shell,
    "That is how Python tells it; a shell adds 128 to the signal's number.": _killed_by_in_python,
    "A small status such as 1 is the program's own, and no signal.": _killed_by_any_status,
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


def _first_two_part(calls: list[list[str]]) -> int | None:
    """A mistake: all other ranks are left out."""
    return where_they_part(calls[:2])


_BROADCAST_FIRST = ["broadcast", "all_reduce"]
_PART_CASES = [
    ([["all_reduce", "barrier"], ["all_reduce", "barrier"]],),
    ([["all_reduce"] * 6, ["all_reduce"] * 5],),
    ([_BROADCAST_FIRST, _BROADCAST_FIRST, ["broadcast", "broadcast"]],),
    ([["all_reduce", "all_gather", "barrier"], ["all_gather", "all_reduce", "barrier"]],),
]
_PART_TRAPS = {
    "A rank that has ended enters nothing: look beyond the end of the shortest list.": _cut_short,
    "Look at all ranks, not only at the first two.": _first_two_part,
}


# ---- the same weights on all ranks


def same_weights(model: torch.nn.Module) -> bool:
    """Whether all ranks have the same weights, to the bit; every rank calls it."""
    same = torch.tensor(int(_as_rank_0(model)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def _as_rank_0(model: torch.nn.Module) -> bool:
    """Whether this rank has rank 0's weights; every rank calls it.

    A mistake as an answer: a rank does not hear of the others.
    """
    weights = _flat_weights(model)
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    return torch.equal(weights, of_rank_0)


def _same_sums(model: torch.nn.Module) -> bool:
    """A mistake: only the sums of the weights are compared; every rank calls it."""
    total = _flat_weights(model).sum()
    low, high = total.clone(), total.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(low == high)


def _flat_weights(model: torch.nn.Module) -> Tensor:
    """Return all weights of a model in one vector."""
    return parameters_to_vector(model.parameters()).detach()


def _try_on_layers(answer: Callable, *weights: list[float]) -> list:
    """Call an answer with a layer, on as many ranks as there are weights: each rank has its own."""

    def call_answer() -> object:
        model = torch.nn.Linear(2, 1)
        vector_to_parameters(torch.tensor(weights[dist.get_rank()]), model.parameters())
        return answer(model)

    return on_ranks(len(weights), call_answer)


_WEIGHTS_CASES = [
    ([1.0, 2.0, 3.0],) * 3,
    ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 4.0]),
    ([1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]),
]
_WEIGHTS_TRAPS = {
    "Different weights can have the same sum: compare all of them.": _same_sums,
    "A rank that is like rank 0 must hear of those that are not: one more collective.": _as_rank_0,
}


# ---- the step at which all ranks stop


def stop_step(told_at: int, every: int) -> int:
    """Return the step before which this rank leaves its loop; every rank calls it.

    told_at: the step in which this rank is told to stop; every: steps from one vote to the next.
    """
    return _stop_by_vote(told_at, every, dist.ReduceOp.MAX)


def _stop_by_vote(told_at: int, every: int, decide: dist.ReduceOp.RedOpType) -> int:
    """Return the step of the first vote whose result, over all ranks, is not 0."""
    step = 0
    while True:
        stop = torch.tensor(int(step >= told_at))
        dist.all_reduce(stop, decide)
        if stop:
            return step
        step += every


def _stop_alone(told_at: int, every: int) -> int:
    """A mistake: each rank leaves at the first vote after it was told."""
    return -(-told_at // every) * every


def _stop_when_all_are_told(told_at: int, every: int) -> int:
    """A mistake: the ranks go on until the last one is told."""
    return _stop_by_vote(told_at, every, dist.ReduceOp.MIN)


def _stop_at_any_step(told_at: int, every: int) -> int:
    """A mistake: the ranks vote in each step."""
    return stop_step(told_at, every=1)


# For each rank, told_at and every.
_STOP_CASES = [
    ((3, 1), (4, 1), (5, 1)),
    ((7, 4), (5, 4), (9, 4)),
    ((8, 4), (9, 4), (12, 4)),
    ((0, 3), (5, 3), (4, 3)),
]
_STOP_TRAPS = {
    "The ranks leave at different steps: who leaves alone is waited for.": _stop_alone,
    "One rank that was told is enough: do not wait until all are.": _stop_when_all_are_told,
    "They vote only in the steps 0, `every`, twice `every`, and so on.": _stop_at_any_step,
}


EXERCISES = [
    Exercise(killed_by, [(137,), (-9,), (-11,), (134,), (1,), (0,)], _KILLED_TRAPS),
    Exercise(where_they_part, _PART_CASES, _PART_TRAPS),
    OnRanks(same_weights, _WEIGHTS_CASES, _WEIGHTS_TRAPS, _try_on_layers),
    OnRanks(stop_step, _STOP_CASES, _STOP_TRAPS, call_with_own_case),
]
