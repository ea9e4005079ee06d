"""The exercises of notebook 02: a mean over ranks, which rank is missing, totals by name.

`lessons.check` asks them for verdicts. The first and the last run on ranks that `on_ranks` forks,
where every rank calls the answer; the other runs in the learner's process.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case, on_ranks, sum_over_ranks

# ---- a mean over ranks


def mean_over_ranks(mine: float) -> float:
    """Compute the mean of all ranks' numbers; every rank calls it with its own."""
    return sum_over_ranks(mine) / dist.get_world_size()


def _number_of_rank_0(number: float) -> float:
    """A mistake: rank 0's number, on every rank."""
    copy = torch.tensor(number)
    dist.broadcast(copy, 0)
    return copy.item()


def _mean_of_two(number: float) -> float:
    """A mistake: the sum is divided by 2, whatever the number of ranks."""
    return sum_over_ranks(number) / 2


def _unchanged(number: float) -> float:
    """A mistake: each rank's own number."""
    return number


_MEAN_TRAPS = {
    "The default of all_reduce is the sum: divide it by the world size.": sum_over_ranks,
    "The group may have any size: ask for it with dist.get_world_size().": _mean_of_two,
    "That is rank 0's number on every rank: all ranks' numbers count.": _number_of_rank_0,
    "Each rank gives its own number back: all_reduce leaves the sum in the tensor.": _unchanged,
}

# ---- which rank is missing


def missing_ranks(
    lines: Sequence[str],
    world_size: int,
    pattern: str = r"^Hello from rank (\d+) of",
) -> list[int]:
    """List the ranks, in order, whose number stands in no line at the place that the pattern says.

    pattern: a regular expression with one group; another one than the default is a mistake.
    """
    present = {int(number) for line in lines for number in re.findall(pattern, line)}
    return [rank for rank in range(world_size) if rank not in present]


def _hello(rank: int, world_size: int) -> str:
    """Compose the line that `simple_ddp` prints, on nodes of four ranks."""
    local_rank = rank % 4
    return f"Hello from rank {rank} of {world_size}, local rank {local_rank}, started by slurm"


def _all_after_the_number_of_lines(lines: Sequence[str], world_size: int) -> list[int]:
    """A mistake: it takes the number of lines for the first rank that is missing."""
    return list(range(sum("Hello" in line for line in lines), world_size))


def _all_ranks(lines: Sequence[str], world_size: int) -> list[int]:
    """A mistake: no rank, a number, is among the ranks that are present, which are texts."""
    return list(range(world_size))


_by_first_digit = partial(missing_ranks, pattern=r"^Hello from rank (\d)")
_by_local_rank = partial(missing_ranks, pattern=r"local rank (\d+)")
_MISSING_CASES = [
    ([_hello(3, 4), "rank 3 on cpu: output -0.85", _hello(0, 4)], 4),
    ([_hello(rank, 12) for rank in (10, 0, 2)], 12),
    ([_hello(0, 2), _hello(1, 2), "all 2 ranks hold the same model"], 2),
    ([_hello(rank, 8) for rank in (6, 4, 7, 5)], 8),
    ([_hello(1, 3), "waiting for rank 2", _hello(0, 3)], 3),
]
_MISSING_TRAPS: dict[str, Answer] = {
    "The number of lines says how many came, not who.": _all_after_the_number_of_lines,
    "A rank can have more than one digit.": _by_first_digit,
    "That is the local rank, which starts again on every node.": _by_local_rank,
    "Other lines name ranks, too, and the hello lines also local ranks: count neither.": (
        partial(missing_ranks, pattern=r"rank (\d+)")
    ),
    "Other lines name ranks, too: only a rank that says hello has come.": (
        partial(missing_ranks, pattern=r"^.*?rank (\d+)")
    ),
    "What a regular expression finds is a string: make it int.": _all_ranks,
}

# ---- totals by name

Sums = dict[str, float]
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "broadcast", "gather"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "barrier"),
)
_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object")  # each makes two
_ONE_EACH = "The totals are right, with a collective for each name: put all values into one tensor."
_OBJECTS = (
    "The totals are right, but a collective of objects makes two, for the sizes and for the "
    "pickled objects: put the values into one tensor."
)


def total_by_name(sums: Sums) -> Sums:
    """Add up the sums of each name over the ranks, in one message; every rank calls it."""
    return _totals(sums, sorted(sums))


def _totals(sums: Sums, names: Sequence[str]) -> Sums:
    """Add up over the ranks, in this order of the names; the order of a dict is a mistake."""
    totals = torch.tensor([float(sums[name]) for name in names])
    dist.all_reduce(totals)
    return dict(zip(names, totals.tolist(), strict=True))


def _paired_with_unsorted_names(sums: Sums) -> Sums:
    """A mistake: the values are sorted by name, and given back in the order of the dict."""
    return dict(zip(sums, total_by_name(sums).values(), strict=True))


def _from_objects(sums: Sums) -> Sums:
    """A mistake: every rank gets every rank's dict."""
    everybody: list[Sums] = [sums] * dist.get_world_size()
    dist.all_gather_object(everybody, sums)
    return {name: sum(one[name] for one in everybody) for name in sums}


def _means(sums: Sums) -> Sums:
    """A mistake: the totals are divided by the number of ranks."""
    return {name: total / dist.get_world_size() for name, total in total_by_name(sums).items()}


def _own_sums(sums: Sums) -> Sums:
    """A mistake: each rank's own sums."""
    total_by_name(sums)
    return sums


def _count_calls(answer: Callable[[Sums], Sums], *case: Sums) -> dict[str, list]:
    """Call an answer on as many ranks as there are dicts, each with its own: a trial.

    Returns what each rank gives back, and how many collectives it called beyond one.
    """
    calls: list[str] = []

    def counting(name: str) -> Callable:
        called = getattr(dist, name)

        def counted(*args: object, **options: object) -> object:
            calls.extend([name] * (2 if name in _OF_OBJECTS else 1))
            return called(*args, **options)

        return counted

    def rank_work() -> tuple[Sums, int]:
        stand_ins: dict[str, Any] = {name: counting(name) for name in _COLLECTIVES + _OF_OBJECTS}
        with patch.multiple(dist, **stand_ins):
            return answer(case[dist.get_rank()]), max(0, len(calls) - 1)

    done = on_ranks(len(case), rank_work)
    return {"totals": [sums for sums, _ in done], "calls too many": [many for _, many in done]}


_TOTAL_TRAPS: dict[str, Answer] = {
    "Another rank may have the names in another order: sort them, so that places agree.": (
        lambda sums: _totals(sums, list(sums))
    ),
    "You sort the names for the tensor; take the totals out of it in the sorted order, too.": (
        _paired_with_unsorted_names
    ),
    _ONE_EACH: lambda sums: {name: sum_over_ranks(sums[name]) for name in sorted(sums)},
    "Another rank may have the names in another order; and one tensor with all needs one call.": (
        lambda sums: {name: sum_over_ranks(sums[name]) for name in sums}
    ),
    _OBJECTS: _from_objects,
    "Those are means: totals are not divided by the number of ranks.": _means,
    "Each rank gives its own sums back: take the totals out of the tensor.": _own_sums,
}

EXERCISES = [
    OnRanks(
        mean_over_ranks,
        [((1.0,), (2.0,), (6.0,)), ((4.0,),), ((-1.0,), (4.0,))],
        _MEAN_TRAPS,
        call_with_own_case,
    ),
    Exercise(missing_ranks, _MISSING_CASES, _MISSING_TRAPS),
    OnRanks(
        total_by_name,
        [
            (
                {"loss": 3.0, "right": 5, "seen": 8},
                {"right": 2, "seen": 4, "loss": 1.5},
                {"seen": 16, "loss": 0.25, "right": 10},
            ),
            ({"seen": 3, "loss": 0.5},),
            ({"loss": 2.0, "right": 7}, {"right": 1, "loss": 4.5}),
        ],
        _TOTAL_TRAPS,
        _count_calls,
    ),
]
