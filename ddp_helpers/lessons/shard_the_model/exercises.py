"""The exercises of notebook 15: the collectives of a layer whose weight is cut over the ranks.

Each function is the trial of the exercise that has its name; it runs on every rank.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import on_real_ranks, random_numbers


def sharded_forward(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with a whole linear layer, of whose weight each rank has some rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = random_numbers(1, 2 * size, 3), random_numbers(2 + rank, 4, 3)
    shards = weight.chunk(size)
    known = {
        "Each rank has some rows only: all must come together before you multiply.": (
            F.linear(x, shards[rank])
        ),
        "The parts belong one below the other, in the order of the ranks.": (
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


_OWN = "The other ranks' gradients belong in it, too: these are rows of your own."


def parallel_product(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with a whole linear layer, of whose weight and input each rank has some columns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = random_numbers(1, 5, 2 * size), random_numbers(2, 4, 2 * size)
    part, own_x = (whole.chunk(size, 1)[rank].clone() for whole in (weight, x))
    known = {_PART: F.linear(own_x, part)}
    yield Comparison("the output", answer(part, own_x), F.linear(x, weight), known)


_PART = "Each rank's product is a part of the sum only: add them up over the ranks."

EXERCISES = [on_real_ranks(each) for each in (sharded_forward, own_gradient, parallel_product)]
