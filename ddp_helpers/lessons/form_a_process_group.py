"""Exercises of notebook 02."""

import re
from collections.abc import Sequence

from ddp_helpers.lessons.exercise import Exercise


def after_all_reduce(world_size: int) -> int:
    """What every rank holds after all_reduce, if rank r held r + 1."""
    return sum(range(1, world_size + 1))


def barrier_waits(arrival: Sequence[float]) -> list[float]:
    """Seconds that each rank spends in a barrier, from the seconds at which the ranks enter it."""
    return [max(arrival) - mine for mine in arrival]


def reduce_scatter_parts(held: Sequence[Sequence[float]]) -> list[float]:
    """What each rank gets from a reduce-scatter, if rank r held the numbers held[r], one for each rank."""
    return [sum(places) for places in zip(*held, strict=True)]


def missing_ranks(lines: Sequence[str], world_size: int) -> list[int]:
    """The ranks, in order, of which no line says "Hello from rank R of W"."""
    found = [re.match(r"Hello from rank (\d+) of", line) for line in lines]
    came = {int(match[1]) for match in found if match}
    return [rank for rank in range(world_size) if rank not in came]


def first_digits(lines: Sequence[str], world_size: int) -> list[int]:
    """A mistake: one digit of the rank."""
    came = {int(line[16]) for line in lines if line.startswith("Hello from rank ")}
    return [rank for rank in range(world_size) if rank not in came]


def local_ranks(lines: Sequence[str], world_size: int) -> list[int]:
    """A mistake: the number at the end of the line."""
    came = {int(line.split()[-1]) for line in lines if line.startswith("Hello")}
    return [rank for rank in range(world_size) if rank not in came]


def hello(rank: int, world_size: int) -> str:
    """The line of `simple_ddp`, on nodes of four ranks."""
    return f"Hello from rank {rank} of {world_size} on node{rank // 4 + 1}, local rank {rank % 4}"


EXERCISES = [
    Exercise(
        after_all_reduce,
        [(4,), (1,), (7,)],
        {
            "Ranks count from 0, and rank r holds r + 1.": lambda world_size: sum(range(world_size)),
            "The default of all_reduce is the sum; nothing divides it.": lambda world_size: (world_size + 1) / 2,
        },
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
        reduce_scatter_parts,
        [([[1, 2], [3, 4]],), ([[1, 0, 2], [5, 1, 1], [0, 0, 9]],), ([[5]],)],
        {
            "That adds up what one rank holds; rank r gets place r, summed over the ranks.": lambda held: [
                *map(sum, held)
            ],
            "That is an all_reduce: a reduce-scatter leaves one of the sums on each rank.": lambda held: [
                [sum(places) for places in zip(*held, strict=True)] for _ in held
            ],
        },
    ),
    Exercise(
        missing_ranks,
        [
            ([hello(3, 4), "rank 3 on cpu: output -0.85", hello(0, 4)], 4),
            ([hello(rank, 12) for rank in (10, 0, 2)], 12),
            ([hello(0, 2), hello(1, 2), "all 2 ranks hold the same model"], 2),
        ],
        {
            "The number of lines says how many came, not who.": lambda lines, world_size: [
                *range(sum("Hello" in line for line in lines), world_size)
            ],
            "A rank can have more than one digit.": first_digits,
            "That is the local rank, which starts again on every node.": local_ranks,
        },
    ),
]
