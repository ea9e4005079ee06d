"""Exercises 6 and 7 of notebook 16: collectives inside functions that autograd can go back through.

`exercises.py` takes the judges; the trials run on every rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_helpers.lessons.build_it_yourself.calls import CallLog
from ddp_helpers.lessons.build_it_yourself.judge import (
    close,
    counted,
    judge_on_ranks,
    random_numbers,
)
from ddp_helpers.lessons.exercise import Answer

# ---- 6: BatchNorm over the rows of all ranks

_EPS = 0.1  # large, so that it shows where it is added


def _norm_trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Normalise batches of 3, 4 and 5 rows, and of other numbers; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in (1, 2):
        batches = [random_numbers(10 * seed + r, 3 + r, 4) + r for r in range(size)]
        upstream = [random_numbers(50 * seed + r, 3 + r, 4) for r in range(size)]
        x = batches[rank].clone().requires_grad_()
        whole = torch.cat(batches).requires_grad_()
        expected = F.batch_norm(whole, None, None, training=True, eps=_EPS)
        expected.backward(torch.cat(upstream))
        mine = slice(sum(map(len, batches[:rank])), sum(map(len, batches[: rank + 1])))
        with log.listening():
            result: Any = answer(x, _EPS)
        forward_calls = len(log.calls)
        yield _wrong_output(result, expected.detach()[mine], batches)
        if not result.requires_grad:
            yield "the output is right, but autograd does not know that it came from x."
        with log.listening():
            result.backward(upstream[rank])
        yield (
            _wrong_norm_gradient(x, _rows(whole.grad, mine), batches, upstream)
            or _wrong_counts(forward_calls, len(log.calls))
        )


def _rows(tensor: Tensor | None, rows: slice) -> Tensor:
    """Take some rows of a gradient, which must be there."""
    assert tensor is not None, "backward has run"
    return tensor[rows]


def _wrong_output(result: Any, expected: Tensor, batches: list[Tensor]) -> str:
    """Say what is wrong with the normalised rows; an empty text if nothing is."""
    if not isinstance(result, Tensor):
        return f"it returns {type(result).__name__}, and should return the normalised tensor."
    result = result.detach()
    if close(result, expected):
        return ""
    own, whole = batches[dist.get_rank()], torch.cat(batches)
    mean, variance = whole.mean(0), whole.var(0, correction=0)
    if close(result, F.batch_norm(own, None, None, training=True, eps=_EPS)):
        return "the rows are normalised by this rank's mean and variance, not by those of all."
    if close(result, (own - mean) / (whole.var(0) + _EPS).sqrt()):
        return "the variance is divided by the count - 1: BatchNorm normalises by the count."
    if close(result, (own - mean) / (variance.sqrt() + _EPS)):
        return "eps is added to the root: it belongs under it."
    means = torch.stack([batch.mean(0) for batch in batches])
    squares = torch.stack([batch.square().mean(0) for batch in batches])
    variances = torch.stack([batch.var(0, correction=0) for batch in batches]).mean(0)
    for spread in (variances, squares.mean(0) - means.mean(0) ** 2):
        if close(result, (own - means.mean(0)) / (spread + _EPS).sqrt()):
            return (
                "the ranks' means are averaged, though the ranks have "
                f"{', '.join(str(len(batch)) for batch in batches)} rows: add up sums and counts, "
                "and divide at the end."
            )
    return (
        "the output is not that of one BatchNorm over all rows: (x - mean) / sqrt(variance + eps), "
        "with the variance E[x²] - E[x]² over the rows of all ranks."
    )


def _wrong_norm_gradient(
    x: Tensor,
    expected: Tensor,
    batches: list[Tensor],
    upstream: list[Tensor],
) -> str:
    """Say what is wrong with the gradient of the inputs; an empty text if nothing is."""
    if x.grad is None:
        return "the output is right, but x gets no gradient: backward returns one for each input."
    if close(x.grad, expected):
        return ""
    rank, whole = dist.get_rank(), torch.cat(batches)
    std = (whole.var(0, correction=0) + _EPS).sqrt()
    normal = [(batch - whole.mean(0)) / std for batch in batches]
    own, gradient = normal[rank], upstream[rank]
    pairs = list(zip(upstream, normal, strict=True))
    sums = [torch.stack([g.sum(0), (g * n).sum(0)]) for g, n in pairs]
    total, count, rows = sum(sums, torch.zeros_like(sums[0])), len(whole), len(own)
    known = {
        (*(sums[rank] / count),): _LOCAL_SUMS,
        (*(sums[rank] / rows),): _LOCAL_SUMS,
        (*(total / rows),): "the sums are of all ranks, and are divided by this rank's rows only.",
        (total[0] / count, 0.0): "the term with the normalised x is missing: x moves the variance.",
        (0.0, total[1] / count): "the mean of the gradient is missing: x moves the mean.",
        (0.0, 0.0): "backward treats mean and variance as constants: x moves both.",
        (*total,): "the two sums are not divided by the count of all rows.",
    }
    for (mean, slope), sentence in known.items():
        if close(x.grad, (gradient - mean - own * slope) / std):
            return f"the output is right, and the gradient of x is not: {sentence}"
    if close(x.grad, expected * std):
        return "the output is right, and the gradient of x is not: divide by the root, too."
    return f"the output is right, and the gradient of x is not. {_NORM_FORMULA}"


_LOCAL_SUMS = (
    "it is as if only this rank's output depended on x. Autograd does not know of the all-reduce: "
    "x moves the mean of all ranks, so backward adds up over the ranks, too."
)
_NORM_FORMULA = (
    "With g the gradient of the output and y the output: (g - E[g] - y * E[g * y]) / sqrt(variance "
    "+ eps), with both means over the rows of all ranks."
)


def _wrong_counts(forward: int, backward: int) -> str:
    """Say whether more than a message each way was sent; an empty text if not."""
    if (forward, backward) != (1, 1):
        return (
            f"{counted(forward, 'message')} in forward and {backward} in backward: one each is "
            "enough, since all sums fit into one tensor."
        )
    return ""


# ---- 7: the two sums of tensor parallel


def _parallel_trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Compute two layers of which each rank has a part; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in (1, 2):
        inputs, upstream = random_numbers(seed, 3, 4), random_numbers(seed + 5, 3, 5)
        whole = [random_numbers(seed + 10, 6, 4), random_numbers(seed + 20, 5, 6)]
        x, up, down = _leaves(inputs, whole[0].chunk(size)[rank], whole[1].chunk(size, 1)[rank])
        whole_x, whole_up, whole_down = _leaves(inputs, *whole)
        expected = torch.tanh(whole_x @ whole_up.T) @ whole_down.T
        part = torch.tanh(whole_x @ up.detach().T) @ down.detach().T
        with log.listening():
            result: Any = answer(x, up, down)
        forward_calls = len(log.calls)
        yield _wrong_product(result, expected, part)
        if not result.requires_grad:
            yield "the output is right, but autograd does not know that it came from x."
        [local] = torch.autograd.grad(part, whole_x, upstream)
        expected.backward(upstream)
        with log.listening():
            result.backward(upstream)
        gradients = _whole_gradients(whole_up, whole_down)
        yield (
            _wrong_weight_gradient("up", up, gradients[0].chunk(size)[rank])
            or _wrong_weight_gradient("down", down, gradients[1].chunk(size, 1)[rank])
            or _wrong_input_gradient(x, whole_x, local)
            or _wrong_sums(forward_calls, len(log.calls))
        )


def _leaves(*tensors: Tensor) -> list[Tensor]:
    """Make copies that get gradients."""
    return [tensor.clone().requires_grad_() for tensor in tensors]


def _whole_gradients(*tensors: Tensor) -> list[Tensor]:
    """Return the gradients of leaves, all of which must be there."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _wrong_product(result: Any, expected: Tensor, part: Tensor) -> str:
    """Say what is wrong with the output; an empty text if nothing is."""
    if not isinstance(result, Tensor):
        return f"it returns {type(result).__name__}, and should return the output."
    if close(result.detach(), expected.detach()):
        return ""
    if close(result.detach(), part.detach()):
        return "the output is this rank's product only: the whole one is the sum over the ranks."
    if close(result.detach(), expected.detach() / dist.get_world_size()):
        return "the output is the mean of the ranks' products: they are parts of a sum."
    return "the output is not tanh(x @ up.T) @ down.T with the whole up and the whole down."


def _wrong_weight_gradient(name: str, weight: Tensor, expected: Tensor) -> str:
    """Say what is wrong with the gradient of a weight's part; an empty text if nothing is."""
    size = dist.get_world_size()
    if weight.grad is None:
        return f"the output is right, but {name} gets no gradient: something cuts the graph."
    if close(weight.grad, expected):
        return ""
    if close(weight.grad, expected * size):
        return (
            f"the output is right, and the gradient of {name} is {size} times too large: every "
            "rank has the whole gradient of the output, so backward adds nothing up there."
        )
    if close(weight.grad, expected / size):
        return (
            f"the output is right, and the gradient of {name} is {size} times too small: nothing "
            "is a mean here, so nothing is divided."
        )
    return f"the output is right, and the gradient of {name} is not."


def _wrong_input_gradient(x: Tensor, whole_x: Tensor, local: Tensor) -> str:
    """Say what is wrong with the gradient of the input; an empty text if nothing is."""
    assert whole_x.grad is not None, "backward has run"
    if x.grad is None:
        return "output and weights are right, but x gets no gradient: something cuts the graph."
    if close(x.grad, whole_x.grad):
        return ""
    if close(x.grad, local):
        return (
            "output and weights are right, and the gradient of x is only the part that comes "
            "through this rank's rows of up. Every rank used x, so where x enters, backward adds "
            "up over the ranks."
        )
    if close(x.grad, whole_x.grad / dist.get_world_size()):
        return "output and weights are right; the gradient of x is a mean, and should be a sum."
    return "output and weights are right, and the gradient of x is not the sum over the ranks."


def _wrong_sums(forward: int, backward: int) -> str:
    """Say whether more than one sum each way was made; an empty text if not."""
    if (forward, backward) != (1, 1):
        return (
            f"{counted(forward, 'message')} in forward and {backward} in backward. One each is "
            "enough: where x enters, forward has nothing to send, and at the output backward has "
            "nothing to send."
        )
    return ""


_FUNCTION_HINTS = {
    "returned an incorrect number of gradients": (
        "backward returns one value for each argument of forward, None for those that need none."
    ),
    "NotImplementedError": "Both forward and backward are static methods of the Function.",
    "must either be": "Save tensors with ctx.save_for_backward.",
}

NORM_JUDGE = judge_on_ranks(_norm_trial, _FUNCTION_HINTS)
PARALLEL_JUDGE = judge_on_ranks(_parallel_trial, _FUNCTION_HINTS)
