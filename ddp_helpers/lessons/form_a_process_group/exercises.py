"""The exercises of notebook 02: a mean over ranks, which rank is missing, totals by name.

`lessons.check` asks them for verdicts. The first and the last are trials, which run on every rank
and have the name of their exercise; the other runs in the driver process.
"""

import re
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks

# ---- a mean over ranks


def mean_over_ranks(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the mean of all ranks' numbers, each of which one rank gives."""
    for numbers in ([1.0, 2.0, 6.0], [-1.0, 4.0, 0.5]):
        numbers = numbers[: dist.get_world_size()]
        mine, total = numbers[dist.get_rank()], sum(numbers)
        known = {
            "The default of all_reduce is the sum: divide it by the world size.": total,
            "The group may have any size: ask for it with dist.get_world_size().": total / 2,
            "That is rank 0's number on every rank: all ranks' numbers count.": numbers[0],
            "That is this rank's own number: all_reduce leaves the sum in the tensor.": mine,
        }
        yield Comparison(f"the mean of {numbers}", answer(mine), total / len(numbers), known)


# ---- which rank is missing


def missing_ranks(lines: Sequence[str], world_size: int) -> list[int]:
    """List the ranks, in order, without a line that says hello."""
    return _absent(lines, world_size, r"^Hello from rank (\d+) of")


def _absent(lines: Sequence[str], world_size: int, pattern: str) -> list[int]:
    """List the ranks, in order, that the pattern's group finds in no line."""
    present = {int(number) for line in lines for number in re.findall(pattern, line)}
    return [rank for rank in range(world_size) if rank not in present]


def _hello(rank: int, world_size: int) -> str:
    """Compose the line that `simple_ddp` prints, on nodes of four ranks."""
    local_rank = rank % 4
    return f"Hello from rank {rank} of {world_size}, local rank {local_rank}, started by slurm"


_MISSING_CASES = [
    ([_hello(3, 4), "rank 3 on cpu: output -0.85", _hello(0, 4)], 4),
    ([_hello(rank, 12) for rank in (10, 0, 2)], 12),
    ([_hello(0, 2), _hello(1, 2), "all 2 ranks hold the same model"], 2),
    ([_hello(rank, 8) for rank in (6, 4, 7, 5)], 8),
    ([_hello(1, 3), "waiting for rank 2", _hello(0, 3)], 3),
]
_MISSING_TRAPS: dict[str, Answer] = {
    "The number of lines shows how many ranks came, not which.": (
        lambda lines, size: list(range(sum("Hello" in line for line in lines), size))
    ),
    "A rank can have more than one digit.": (
        lambda lines, size: _absent(lines, size, r"^Hello from rank (\d)")
    ),
    "Other lines also name ranks, and the hello lines name local ranks: count neither.": (
        lambda lines, size: _absent(lines, size, r"rank (\d+)")
    ),
    "A regular expression finds strings: make them int.": (
        lambda _, size: list(range(size))  # no int is among the texts
    ),
}

# ---- totals by name

_SUMS = [
    [
        {"loss": 3.0, "right": 5, "seen": 8},
        {"right": 2, "seen": 4, "loss": 1.5},
        {"seen": 16, "loss": 0.25, "right": 10},
    ],
    [{"loss": 2.0, "right": 7}, {"right": 1, "loss": 4.5}, {"loss": 0.5, "right": 2}],
]


def total_by_name(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare with the totals, and the calls with one message of any kind."""
    size = dist.get_world_size()
    for sums in _SUMS:
        sums, own = sums[:size], sums[dist.get_rank()]
        result = answer(dict(own))
        totals = {name: sum(one[name] for one in sums) for name in own}
        by_place = [sum(values) for values in zip(*(one.values() for one in sums), strict=True)]
        known: dict[str, object] = {
            _ORDERS: dict(zip(own, by_place, strict=True)),
            _PAIRS: dict(zip(own, (totals[name] for name in sorted(own)), strict=True)),
            "Those are means: totals are not divided by the number of ranks.": (
                {name: total / size for name, total in totals.items()}
            ),
            "Each rank returns its own sums: take the totals out of the tensor.": own,
        }
        yield Comparison("the totals", result, totals, known)
        names = log.names()
        is_one = len(names) == 1 and "object" not in names[0]
        known = {_ONE_EACH: ["all_reduce"] * len(own), _OBJECTS: ["all_gather_object"]}
        what = "the totals are right; the collectives called"
        yield Comparison(what, names, names if is_one else ["all_reduce"], known)


_ORDERS = "A rank may have the names in a different order: sort them, so that places agree."
_PAIRS = "You sort the names for the tensor; take the totals out of it in sorted order as well."
_ONE_EACH = "One collective for each name: put all values into one tensor."
_OBJECTS = (
    "A collective of objects makes two, for the sizes and for the pickled objects: put the values "
    "into one tensor."
)

EXERCISES = [
    on_real_ranks(mean_over_ranks),
    Exercise(missing_ranks, _MISSING_CASES, _MISSING_TRAPS),
    on_real_ranks(total_by_name),
]
