"""Exercises of notebook 02: a mean over ranks, who waits in a barrier, which rank is missing."""

import re
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, each_its_own, summed


def mean_over_ranks(mine: float) -> float:
    """Compute the mean of all ranks' numbers, on every rank."""
    return summed(mine) / dist.get_world_size()


def number_of_rank_0(mine: float) -> float:
    """A mistake: rank 0's number, on every rank."""
    copy = torch.tensor(mine)
    dist.broadcast(copy, 0)
    return copy.item()


def barrier_waits(arrival: Sequence[float]) -> list[float]:
    """Seconds that each rank spends in a barrier, from the seconds at which the ranks enter it."""
    return [max(arrival) - mine for mine in arrival]


def missing_ranks(lines: Sequence[str], world_size: int, says: str = r"^Hello from rank (\d+) of") -> list[int]:
    """The ranks, in order, of which no line has a number where the pattern says."""
    came = {int(number) for line in lines for number in re.findall(says, line)}
    return [rank for rank in range(world_size) if rank not in came]


def hello(rank: int, world_size: int) -> str:
    """The line of `simple_ddp`, on nodes of four ranks."""
    return f"Hello from rank {rank} of {world_size}, local rank {rank % 4}, started by slurm"


EXERCISES = [
    OnRanks(
        mean_over_ranks,
        [((1.0,), (2.0,), (6.0,)), ((4.0,),), ((-1.0,), (4.0,))],
        {
            "The default of all_reduce is the sum: divide it by the world size.": summed,
            "The group may have any size: ask for it with dist.get_world_size().": lambda mine: summed(mine) / 2,
            "That is rank 0's number on every rank: all ranks' numbers count.": number_of_rank_0,
            "Each rank gives its own number back: all_reduce leaves the sum in the tensor.": lambda mine: mine,
        },
        each_its_own,
    ),
    Exercise(
        barrier_waits,
        [([0.0, 1.0, 3.0],), ([2.0, 2.0],), ([0.5, 2.0, 1.0, 0.0],)],
        {
            "That is when the barrier opens; a rank waits from its own arrival on.": lambda a: [max(a)] * len(a),
            "A rank waits for those that come after it, not for those before.": lambda a: [x - min(a) for x in a],
        },
    ),
    Exercise(
        missing_ranks,
        [
            ([hello(3, 4), "rank 3 on cpu: output -0.85", hello(0, 4)], 4),
            ([hello(rank, 12) for rank in (10, 0, 2)], 12),
            ([hello(0, 2), hello(1, 2), "all 2 ranks hold the same model"], 2),
            ([hello(rank, 8) for rank in (6, 4, 7, 5)], 8),
            ([hello(1, 3), "waiting for rank 2", hello(0, 3)], 3),
        ],
        {
            "The number of lines says how many came, not who.": lambda lines, world_size: [
                *range(sum("Hello" in line for line in lines), world_size)
            ],
            "A rank can have more than one digit.": partial(missing_ranks, says=r"^Hello from rank (\d)"),
            "That is the local rank, which starts again on every node.": partial(
                missing_ranks, says=r"local rank (\d+)"
            ),
            "Other lines name ranks, too, and the hello lines also local ranks: count neither.": partial(
                missing_ranks, says=r"rank (\d+)"
            ),
            "Other lines name ranks, too: only a rank that says hello has come.": partial(
                missing_ranks, says=r"^.*?rank (\d+)"
            ),
            "What a regular expression finds is a string: make it int.": lambda lines, world_size: [*range(world_size)],
        },
    ),
]
