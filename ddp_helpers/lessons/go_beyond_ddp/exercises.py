"""Exercises of notebook 13: what a rank holds, and the two collectives of a sharded layer, on real ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks


def bytes_per_rank(parameters: int, ranks: int, way: str) -> float:
    """Compute the memory of a rank in float32 with Adam, without activations; way: DDP, ZeRO or FSDP2."""
    return parameters * {"DDP": 16, "ZeRO": 8 + 8 / ranks, "FSDP2": 16 / ranks}[way]


def sharded_forward(shard: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T where each rank holds some rows of the weight; every rank must call it."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return x @ torch.cat(parts).T


def own_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Compute this rank's rows of the mean of all ranks' gradients; every rank must call it."""
    mine = gradient.chunk(dist.get_world_size())[dist.get_rank()].clone()
    dist.reduce_scatter_tensor(mine, gradient)
    return mine / dist.get_world_size()


def on_tensors(answer: Callable, *case: tuple) -> list:
    """Call an answer on as many ranks as a case has members, each with its own lists as tensors: a trial."""
    return on_ranks(len(case), lambda: answer(*map(torch.tensor, case[dist.get_rank()])))


SIZES = [(1000, ranks, way) for ranks in (2, 8, 1) for way in ("DDP", "ZeRO", "FSDP2")]
ROWS = [[([[float(rank), 2.0]], [[1.0, 3.0 + rank]]) for rank in range(ranks)] for ranks in (2, 3)]
GRADIENTS = [[([[1.0 + 4 * rank * row] for row in range(ranks)],) for rank in range(ranks)] for ranks in (2, 3)]

EXERCISES = [
    Exercise(
        bytes_per_rank,
        SIZES,
        {
            "Adam keeps two numbers for each parameter, so its state has 8 bytes, and the sum for DDP is 16.": (
                lambda parameters, ranks, way: parameters * {"DDP": 12, "ZeRO": 8 + 4 / ranks, "FSDP2": 12 / ranks}[way]
            ),
            "ZeroRedundancyOptimizer cuts the optimizer state only; parameters and gradients stay whole.": (
                lambda parameters, ranks, way: parameters * (16 if way == "DDP" else 16 / ranks)
            ),
            "DDP cuts nothing: every rank holds a whole replica, its gradients and its optimizer state.": (
                lambda parameters, ranks, way: parameters * {"ZeRO": 8 + 8 / ranks}.get(way, 16 / ranks)
            ),
        },
    ),
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
]
