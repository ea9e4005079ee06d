"""The exercises of notebook 15: the collectives of a layer whose weight is cut over the ranks.

`lessons.check` asks them for verdicts, in the learner's process; each answer runs on real ranks,
which are forked from it.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks


def _on_tensors(answer: Callable, *case: tuple) -> list:
    """Call an answer on as many ranks as a case has members, each with its lists as tensors.

    Returns what each rank returned. The learner's process calls it: a trial.
    """
    return on_ranks(len(case), lambda: answer(*map(torch.tensor, case[dist.get_rank()])))


# ---- 1: the forward pass of a layer whose rows are cut over the ranks


def sharded_forward(shard: Tensor, x: Tensor) -> Tensor:
    """Compute x @ weight.T where each rank holds some rows of the weight; every rank calls it."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    return x @ torch.cat(shards).T


def _forward_of_shard(shard: Tensor, x: Tensor) -> Tensor:
    """A mistake: the rows of this rank only."""
    return x @ shard.T


def _forward_in_reverse(shard: Tensor, x: Tensor) -> Tensor:
    """A mistake: the outputs of the last rows come first."""
    return sharded_forward(shard, x).flip(-1)


def _rows_case(ranks: int) -> tuple:
    """List for each rank its row of the weight, and its inputs."""
    return tuple(([[float(rank), 2.0]], [[1.0, 3.0 + rank]]) for rank in range(ranks))


_SHARDED_FORWARD = OnRanks(
    sharded_forward,
    [_rows_case(2), _rows_case(3)],
    {
        "Each rank has some rows only: all must come together before you multiply.": (
            _forward_of_shard
        ),
        "The parts belong one below the other, in the order of the ranks.": _forward_in_reverse,
    },
    _on_tensors,
)


# ---- 2: a rank's rows of the mean gradient


def own_gradient(gradient: Tensor) -> Tensor:
    """Compute this rank's rows of the mean of all ranks' gradients; every rank calls it."""
    shards = list(gradient.chunk(dist.get_world_size()))
    total = torch.empty_like(shards[dist.get_rank()])
    dist.reduce_scatter(total, shards)
    return total / dist.get_world_size()


def _summed_gradient(gradient: Tensor) -> Tensor:
    """A mistake: the sum over the ranks."""
    return own_gradient(gradient) * dist.get_world_size()


def _local_gradient(gradient: Tensor) -> Tensor:
    """A mistake: the rows of this rank's gradient only."""
    return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def _gradients_case(ranks: int) -> tuple:
    """List for each rank its gradient, a row for each rank."""
    return tuple(([[1.0 + 4 * rank * row] for row in range(ranks)],) for rank in range(ranks))


_OWN_GRADIENT = OnRanks(
    own_gradient,
    [_gradients_case(2), _gradients_case(3)],
    {
        "That is the sum; DDP's gradient is the mean.": _summed_gradient,
        "The other ranks' gradients belong in it, too: these are rows of your own.": (
            _local_gradient
        ),
    },
    _on_tensors,
)


# ---- 3: the product with a weight whose columns are cut over the ranks


def parallel_product(part: Tensor, x: Tensor) -> Tensor:
    """Compute x @ weight.T where each rank holds some columns of the weight and of x.

    Every rank calls it.
    """
    output = x @ part.T
    dist.all_reduce(output)
    return output


def _partial_product(part: Tensor, x: Tensor) -> Tensor:
    """A mistake: the product of this rank's columns only."""
    return x @ part.T


def _mean_product(part: Tensor, x: Tensor) -> Tensor:
    """A mistake: the mean over the ranks."""
    return parallel_product(part, x) / dist.get_world_size()


def _columns_case(ranks: int) -> tuple:
    """List for each rank its column of the weight, and its inputs."""
    return tuple(([[1.0 + rank], [2.0]], [[3.0], [rank - 1.0]]) for rank in range(ranks))


_PARALLEL_PRODUCT = OnRanks(
    parallel_product,
    [_columns_case(2), _columns_case(3)],
    {
        "Each rank's product is a part of the sum only: add them up over the ranks.": (
            _partial_product
        ),
        "That is the mean of the parts; the product is their sum.": _mean_product,
    },
    _on_tensors,
)

EXERCISES = [_SHARDED_FORWARD, _OWN_GRADIENT, _PARALLEL_PRODUCT]
