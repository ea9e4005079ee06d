"""Exercises of notebook 13: the collectives of a layer whose weight is cut over the ranks, on real ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks


def sharded_forward(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T where each rank holds some rows of the weight; every rank must call it."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return x @ torch.cat(parts).T


def own_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Compute this rank's rows of the mean of all ranks' gradients; every rank must call it."""
    parts = list(gradient.chunk(dist.get_world_size()))
    mine = torch.empty_like(parts[dist.get_rank()])
    dist.reduce_scatter(mine, parts)
    return mine / dist.get_world_size()


def parallel_product(part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T where each rank holds some columns of the weight and of x; every rank must call it."""
    output = x @ part.T
    dist.all_reduce(output)
    return output


def on_tensors(answer: Callable, *case: tuple) -> list:
    """Call an answer on as many ranks as a case has members, each with its own lists as tensors: a trial."""
    return on_ranks(len(case), lambda: answer(*map(torch.tensor, case[dist.get_rank()])))


ROWS = [[([[float(rank), 2.0]], [[1.0, 3.0 + rank]]) for rank in range(ranks)] for ranks in (2, 3)]
GRADIENTS = [[([[1.0 + 4 * rank * row] for row in range(ranks)],) for rank in range(ranks)] for ranks in (2, 3)]
COLUMNS = [[([[1.0 + rank], [2.0]], [[3.0], [rank - 1.0]]) for rank in range(ranks)] for ranks in (2, 3)]

EXERCISES = [
    OnRanks(
        sharded_forward,
        ROWS,
        {
            "Each rank has some rows only: all must come together before you multiply.": lambda shard, x: x @ shard.T,
            "The parts belong one below the other, in the order of the ranks.": (
                lambda shard, x: sharded_forward(shard, x).flip(-1)
            ),
        },
        on_tensors,
    ),
    OnRanks(
        own_gradient,
        GRADIENTS,
        {
            "That is the sum; DDP's gradient is the mean.": lambda full: own_gradient(full) * dist.get_world_size(),
            "The other ranks' gradients belong in it, too: these are rows of your own.": (
                lambda full: full.chunk(dist.get_world_size())[dist.get_rank()]
            ),
        },
        on_tensors,
    ),
    OnRanks(
        parallel_product,
        COLUMNS,
        {
            "Each rank's product is a part of the sum only: add them up over the ranks.": lambda part, x: x @ part.T,
            "That is the mean of the parts; the product is their sum.": (
                lambda part, x: parallel_product(part, x) / dist.get_world_size()
            ),
        },
        on_tensors,
    ),
]
