"""Exercises of notebook 10: two in plain Python, and two whose answers run on real ranks."""

from collections.abc import Callable
from itertools import zip_longest

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, each_its_own, on_ranks


def on_layers(answer: Callable, *case: list[float]) -> list:
    """Call an answer on as many ranks as a case has members, each with a layer that has these weights."""

    def work() -> object:
        model = torch.nn.Linear(2, 1)
        torch.nn.utils.vector_to_parameters(torch.tensor(case[dist.get_rank()]), model.parameters())
        return answer(model)

    return on_ranks(len(case), work)


def killed_by(status: int) -> int:
    """The number of the signal that ended a process, from Python's status or a shell's; 0 if none did."""
    if status < 0:
        return -status
    return status - 128 if status > 128 else 0


def where_they_part(calls: list[list[str]]) -> int | None:
    """The first call, counted from 0, in which not all ranks enter the same collective; None if all agree."""
    for number, names in enumerate(zip_longest(*calls)):
        if len(set(names)) > 1:
            return number
    return None


def same_weights(model: torch.nn.Module) -> bool:
    """Whether all ranks have the same weights, to the bit; True or False on all ranks alike."""
    same = torch.tensor(int(like_rank_0(model)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def like_rank_0(model: torch.nn.Module) -> bool:
    """Whether this rank has rank 0's weights; a mistake as an answer: the others are not heard."""
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    return torch.equal(mine, first)


def only_sums(model: torch.nn.Module) -> bool:
    """A mistake: sums of the weights."""
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).sum().detach()
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(low == high)


def stop_step(told_at: int, every: int, decide: dist.ReduceOp = dist.ReduceOp.MAX) -> int:
    """The step before which this rank leaves its loop; it is told in step told_at. All ranks call it."""
    step = 0
    while True:
        stop = torch.tensor(int(step >= told_at))
        dist.all_reduce(stop, decide)
        if stop:
            return step
        step += every


EXERCISES = [
    Exercise(
        killed_by,
        [(137,), (-9,), (-11,), (134,), (1,), (0,)],
        {
            "Python reports a signal as a negative number; a shell adds 128 to it.": lambda status: (
                status - 128 if status > 128 else 0
            ),
            "That is how Python tells it; a shell adds 128 to the signal's number.": lambda status: max(0, -status),
            "A small status such as 1 is the program's own, and no signal.": lambda status: abs(status) % 128,
        },
    ),
    Exercise(
        where_they_part,
        [
            ([["all_reduce", "barrier"], ["all_reduce", "barrier"]],),
            ([["all_reduce"] * 6, ["all_reduce"] * 5],),
            ([["broadcast", "all_reduce"], ["broadcast", "all_reduce"], ["broadcast", "broadcast"]],),
            ([["all_reduce", "all_gather", "barrier"], ["all_gather", "all_reduce", "barrier"]],),
        ],
        {
            "A rank that has ended enters nothing: look beyond the end of the shortest list.": lambda calls: (
                where_they_part([names[: min(map(len, calls))] for names in calls])
            ),
            "Look at all ranks, not only at the first two.": lambda calls: where_they_part(calls[:2]),
        },
    ),
    OnRanks(
        same_weights,
        [
            ([1.0, 2.0, 3.0],) * 3,
            ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 4.0]),
            ([1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]),
        ],
        {
            "Different weights can have the same sum: compare all of them.": only_sums,
            "A rank that is like rank 0 must hear of those that are not: one more collective.": like_rank_0,
        },
        on_layers,
    ),
    OnRanks(
        stop_step,
        [((3, 1), (4, 1), (5, 1)), ((7, 4), (5, 4), (9, 4)), ((8, 4), (9, 4), (12, 4)), ((0, 3), (5, 3), (4, 3))],
        {
            "The ranks leave at different steps: who leaves alone is waited for.": lambda told_at, every: (
                -(-told_at // every) * every
            ),
            "One rank that was told is enough: do not wait until all are.": lambda told_at, every: stop_step(
                told_at, every, dist.ReduceOp.MIN
            ),
            "They vote only in the steps 0, `every`, twice `every`, and so on.": lambda told_at, every: stop_step(
                told_at, 1
            ),
        },
        each_its_own,
    ),
]
