"""The exercises of notebook 02: a mean over ranks, who waits in a barrier, which rank is missing.

`lessons.check` asks them for verdicts. The first runs on ranks that `on_ranks` forks, where every
rank calls the answer; the others run in the learner's process. The figures use `barrier_waits`.
"""

import re
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case, sum_over_ranks

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

# ---- who waits in a barrier


def barrier_waits(arrival: Sequence[float]) -> list[float]:
    """Compute the seconds that each rank spends in a barrier.

    arrival: the seconds at which the ranks enter it.
    """
    return [max(arrival) - seconds for seconds in arrival]


_WAITS_TRAPS = {
    "That is when the barrier opens; a rank waits from its own arrival on.": (
        lambda arrival: [max(arrival)] * len(arrival)
    ),
    "A rank waits for those that come after it, not for those before.": (
        lambda arrival: [seconds - min(arrival) for seconds in arrival]
    ),
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

EXERCISES = [
    OnRanks(
        mean_over_ranks,
        [((1.0,), (2.0,), (6.0,)), ((4.0,),), ((-1.0,), (4.0,))],
        _MEAN_TRAPS,
        call_with_own_case,
    ),
    Exercise(
        barrier_waits,
        [([0.0, 1.0, 3.0],), ([2.0, 2.0],), ([0.5, 2.0, 1.0, 0.0],)],
        _WAITS_TRAPS,
    ),
    Exercise(missing_ranks, _MISSING_CASES, _MISSING_TRAPS),
]
