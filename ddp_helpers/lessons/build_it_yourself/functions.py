"""Exercises 6 and 7 of notebook 16: collectives inside functions that autograd can differentiate.

Each function is the trial of the exercise that has its name; it runs on every rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import random_numbers


def _count(messages: list[int]) -> dict[str, object]:
    """Map the hint on a wrong number of messages to these numbers."""
    return {_ONE_EACH if sum(messages) > 1 else _BY_NAME: messages}


_ONE_EACH = "One message in forward and one in backward are enough."
_BY_NAME = "Call it as dist.all_reduce, with the module's name, so that the checker sees it."


def sync_batch_norm(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare with one BatchNorm over the rows of all ranks, which have 3, 4 and 5."""
    rank, size, eps = dist.get_rank(), dist.get_world_size(), 0.1  # large: its place shows
    for seed in (1, 2):
        batches = [random_numbers(10 * seed + r, 3 + r, 4) + r for r in range(size)]
        upstream = [random_numbers(50 * seed + r, 3 + r, 4) for r in range(size)]
        x, whole = batches[rank].clone().requires_grad_(), torch.cat(batches).requires_grad_()
        expected = F.batch_norm(whole, None, None, training=True, eps=eps)
        expected.backward(torch.cat(upstream))
        result: Any = answer(x, eps)
        forward = log.names()
        alone = F.batch_norm(batches[rank], None, None, training=True, eps=eps)
        means = torch.stack([batch.mean(0) for batch in batches]).mean(0)
        squares = torch.stack([batch.square().mean(0) for batch in batches]).mean(0)
        unweighted = (batches[rank] - means) / (squares - means**2 + eps).sqrt()
        known = {_OWN_ROWS: alone, _UNEQUAL_ROWS: unweighted}
        mine = slice(sum(map(len, batches[:rank])), sum(map(len, batches[: rank + 1])))
        yield Comparison("the output", result, expected[mine], known)
        with log.listening():
            _backward(result, upstream[rank])
        assert whole.grad is not None, "backward has run"
        normal, std = expected.detach(), (whole.var(0, correction=0) + eps).sqrt().detach()
        g, y = upstream[rank], normal[mine]
        local = (g - g.sum(0) / len(whole) - y * (g * y).sum(0) / len(whole)) / std
        means = (g - g.mean(0) - y * (g * y).mean(0)) / std
        known = {_AUTOGRAD: local, _OWN_MEANS: means, _CONSTANT: g / std}
        what = "the output is right; the gradient of x"
        yield Comparison(what, x.grad, whole.grad[mine], known)
        messages = [len(forward), len(log.calls)]
        yield Comparison("messages forward and back", messages, [1, 1], _count(messages))


_OWN_ROWS = "The rows are normalised by this rank's mean and variance, not by those of all rows."
_UNEQUAL_ROWS = (
    "The ranks' means are averaged, though the ranks have unequal numbers of rows: add up sums and "
    "counts, and divide at the end."
)
_AUTOGRAD = (
    "Here only this rank's output depends on x. Autograd does not know of the all-reduce: "
    "x moves the mean of all ranks, so backward also adds up over the ranks."
)
_OWN_MEANS = (
    "Both means are over this rank's rows. x moves the mean of all ranks, so backward also adds up "
    "over the ranks, and divides by the count of all rows."
)
_CONSTANT = "Backward treats mean and variance as constants: x moves both."


def parallel_mlp(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare two layers, of which each rank has a part, with the full ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in (1, 2):
        inputs, upstream = random_numbers(seed, 3, 4), random_numbers(seed + 5, 3, 5)
        ups, downs = random_numbers(seed + 10, 6, 4), random_numbers(seed + 20, 5, 6)
        own = _leaves(inputs, ups.chunk(size)[rank], downs.chunk(size, 1)[rank])
        whole = _leaves(inputs, ups, downs)
        expected, part = _mlp(*whole), _mlp(whole[0], *own[1:])
        result: Any = answer(*own)
        forward = log.names()
        yield Comparison("the output", result, expected, {_PART: part})
        [local] = torch.autograd.grad(part, whole[0], upstream)
        expected.backward(upstream)
        with log.listening():
            _backward(result, upstream)
        gradients = [_gradient(tensor) for tensor in whole]
        right = "the output is right; the gradient of"
        yield Comparison(f"{right} up", own[1].grad, gradients[1].chunk(size)[rank])
        yield Comparison(f"{right} down", own[2].grad, gradients[2].chunk(size, 1)[rank])
        yield Comparison(f"{right} x", own[0].grad, gradients[0], {_ENTER: local})
        messages = [len(forward), len(log.calls)]
        yield Comparison("messages forward and back", messages, [1, 1], _count(messages))


def _backward(result: Tensor, upstream: Tensor) -> None:
    """Go back through an answer's output; raises RuntimeError if backward is not written."""
    try:
        result.backward(upstream)
    except NotImplementedError as error:
        raise RuntimeError("the output is right, and backward is not written yet") from error


def _leaves(*tensors: Tensor) -> list[Tensor]:
    """Make copies that get gradients."""
    return [tensor.clone().requires_grad_() for tensor in tensors]


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x @ up.T) @ down.T


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a leaf, which must be there."""
    assert tensor.grad is not None, "backward has run"
    return tensor.grad


_PART = "The output is this rank's product only: the full output is the sum over the ranks."
_ENTER = (
    "The gradient of x is only the part that comes through this rank's rows of up. Every rank used "
    "x, so where x enters, backward adds up over the ranks."
)
_NOT_IN_PLACE = "Autograd needs x as it was: make a new tensor, as in x = x - mean."
FUNCTION_HINTS = {
    "returned an incorrect number of gradients": (
        "backward returns one value for each argument of forward, None for those that need none."
    ),
    "a leaf Variable that requires grad": _NOT_IN_PLACE,
    "does not require grad": "The output must come from x by operations that autograd follows.",
}
