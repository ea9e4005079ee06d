"""The exercises of notebook 15: the collectives of a sharded layer, and a script to fix.

Each function is the trial of the exercise that has its name; it runs on every rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import on_real_ranks, random_numbers


def sharded_forward(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with a full linear layer; each rank has some rows of its weight."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = random_numbers(1, 2 * size, 3), random_numbers(2 + rank, 4, 3)
    shards = weight.chunk(size)
    known = {
        "Each rank has some rows only: gather all before you multiply.": (
            F.linear(x, shards[rank])
        ),
        "Stack the parts one below the other, in the order of the ranks.": (
            F.linear(x, torch.cat(shards[::-1]))
        ),
    }
    yield Comparison("the output", answer(shards[rank].clone(), x), F.linear(x, weight), known)


def own_gradient(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with this rank's rows of the gradient that DDP averages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = random_numbers(1, 2 * size, 3), random_numbers(2 + rank, 4, 3)
    plain, reference = nn.Linear(3, 2 * size, bias=False), nn.Linear(3, 2 * size, bias=False)
    plain.weight, reference.weight = nn.Parameter(weight), nn.Parameter(weight.clone())
    for model in (plain, DDP(reference)):
        model(x).square().sum().backward()
    gradient, averaged = plain.weight.grad, reference.weight.grad
    assert gradient is not None and averaged is not None, "backward has run"
    known = {_OWN: gradient.chunk(size)[rank].clone()}
    expected = averaged.chunk(size)[rank]
    yield Comparison("this rank's rows", answer(gradient), expected, known)


_OWN = "The other ranks' gradients also belong in it: these rows are only of your own."


def train_sharded(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the unsharded model; rank 0 has one test sample more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, whole = _stack(), _stack()
    first = parameters_to_vector(whole.parameters()).detach().clone()
    numbers = random_numbers(1, 3, 2 * size, 6)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for batch in numbers:
        optimizer.zero_grad()
        F.mse_loss(whole(batch), batch.flip(1)).backward()
        optimizer.step()
    held_out = [(x, x.flip(1)) for x in random_numbers(2, size + 1, 1, 6)]
    with torch.no_grad():
        losses = torch.stack([F.mse_loss(whole(x), y) for x, y in held_out])
    batches = [(x, x.flip(1)) for x in (batch[rank::size] for batch in numbers)]
    result: Any = answer(model, batches, held_out)
    weights, loss = result
    alone = [block for block in model if not isinstance(block, FSDPModule)]
    yield Comparison("blocks without fully_shard", len(alone), 0, {_BLOCKS: len(alone)})
    names = sorted(weights), sorted(whole.state_dict()) if rank == 0 else []
    yield Comparison("the names of the weights", *names)
    kinds = {type(weight).__name__ for weight in weights.values()} or {"Tensor"}
    yield Comparison("the class of the weights", sorted(kinds), ["Tensor"], {_PARTS: ["DTensor"]})
    if rank == 0:
        got = torch.cat([weights[name].flatten() for name, _ in whole.named_parameters()])
        expected = parameters_to_vector(whole.parameters())
    else:
        got = expected = first
    yield Comparison("the weights", got, expected, {_EARLY: first} if rank == 0 else {})
    surplus = torch.cat([losses, losses[-1:].expand(-len(losses) % size)])
    known = {_SURPLUS: surplus.mean(), _OWN_LOSS: losses[rank::size].mean()}
    yield Comparison("the mean loss", torch.as_tensor(loss), losses.mean(), known)


def _stack() -> nn.Sequential:
    """Make three blocks, the same on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)))


_BLOCKS = "Also call fully_shard on each block: otherwise all weights are gathered at once."
_PARTS = "These are shards: half of each weight is on another rank, or more. All ranks must gather."
_EARLY = "Nothing was trained: which tensors does the optimizer hold?"
_SURPLUS = "A repeated sample is counted: leave it out."
_OWN_LOSS = "That is the mean over this rank's samples."

_ORDER = "Blocks first, then the root module: the inner ones must be sharded before the outer one."

EXERCISES = [
    on_real_ranks(sharded_forward),
    on_real_ranks(own_gradient),
    on_real_ranks(train_sharded, {"Invariant encountered": _ORDER}),
]
