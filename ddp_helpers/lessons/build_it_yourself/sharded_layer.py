"""Exercise 5 of notebook 16: a layer that is whole only while it computes.

`exercises.py` takes the judge; the trial runs on every rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_helpers.lessons.build_it_yourself.calls import CallLog
from ddp_helpers.lessons.build_it_yourself.judge import (
    close,
    counted,
    judge_on_ranks,
    random_numbers,
    sum_of_all,
)
from ddp_helpers.lessons.exercise import Answer


def _trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Train two layers for two steps, and look at their storage; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layers, reference = _two_layers(), _two_layers()
    with log.listening():
        owned: list[Any] = [answer(layer) for layer in layers]
    yield _wrong_parts(owned, layers, reference)
    for step in (1, 2):
        for own in owned:
            own.grad = None
        for parameter in (p for layer in reference for p in layer.parameters()):
            parameter.grad = None
        inputs = random_numbers(10 * step + rank, 4, 6).requires_grad_()
        plain_inputs = inputs.detach().clone().requires_grad_()
        expected = _run(reference, plain_inputs)
        between: list[str] = []
        with log.listening():
            output = _run(layers, inputs, lambda b=between: b.append(_held(layers)))
        gathers = len([call for call in log.calls if call.name.startswith("all_gather")])
        yield _wrong_forward(output, expected, between, gathers, step)
        expected.square().mean().backward()
        with log.listening():
            output.square().mean().backward()
        yield _wrong_backward(log, layers, inputs, plain_inputs)
        for own, layer in zip(owned, reference, strict=True):
            total = sum_of_all(_gradient(layer.weight))
            yield _wrong_part_gradient(own, _gradient(layer.weight), total)
            with torch.no_grad():
                own -= 0.3 * own.grad
                layer.weight -= 0.3 * total / size


def _two_layers() -> list[nn.Linear]:
    """Make two layers of 36 and 72 weights, which two and three ranks can cut evenly."""
    torch.manual_seed(8)
    return [nn.Linear(6, out, bias=False, dtype=torch.float64) for out in (6, 12)]


def _run(layers: list[nn.Linear], x: Tensor, between: Callable = lambda: None) -> Tensor:
    """Compute both layers; `between` is called after each."""
    hidden = layers[0](x)
    between()
    output = layers[1](torch.tanh(hidden))
    between()
    return output


def _held(layers: list[nn.Linear]) -> str:
    """Say which layers' weights have memory; an empty text if none has."""
    held = [str(n) for n, layer in enumerate(layers, 1) if _bytes(layer.weight)]
    return " and ".join(held)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _wrong_parts(owned: list, layers: list[nn.Linear], reference: list[nn.Linear]) -> str:
    """Say what is wrong right after the layers were cut; an empty text if nothing is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for own, plain in zip(owned, reference, strict=True):
        if not isinstance(own, nn.Parameter):
            return f"it returns {type(own).__name__}: return this rank's part, an nn.Parameter."
        if _bytes(own) != own.numel() * own.element_size():
            return (
                "this rank's part is a view of the whole weight, which stays in memory, or is "
                "freed with it: clone the part."
            )
        expected = plain.weight.detach().flatten().chunk(size)[rank]
        if own.numel() != expected.numel():
            return (
                f"this rank's part has {own.numel()} numbers, and should have "
                f"{expected.numel()} of {plain.weight.numel()}: one in {size}."
            )
        if not close(own.detach().flatten(), expected):
            return "this rank's part holds other weights: rank r takes chunk r of the flat weight."
    if held := _held(layers):
        return f"after the cut the weight of layer {held} is still whole: {_RESIZE}"
    return ""


_RESIZE = "free it with weight.untyped_storage().resize_(0), which keeps the tensor's shape."


def _wrong_forward(
    output: Tensor,
    expected: Tensor,
    between: list[str],
    gathers: int,
    step: int,
) -> str:
    """Say what is wrong after the forward pass; an empty text if nothing is."""
    if not close(output.detach(), expected.detach()):
        reason = " Are the new parts gathered?" if step == 2 else ""
        return f"in step {step} the output is not that of the whole layer.{reason}"
    if held := next(filter(None, between), ""):
        return f"after its forward the weight of layer {held} is still whole: {_RESIZE}"
    if gathers != 2:
        return f"{counted(gathers, 'all-gather')} in the forward of two layers: one each is enough."
    return ""


def _wrong_backward(
    log: CallLog,
    layers: list[nn.Linear],
    inputs: Tensor,
    plain_inputs: Tensor,
) -> str:
    """Say what is wrong after the backward pass; an empty text if nothing is."""
    if not close(_gradient(inputs), _gradient(plain_inputs)):
        return "the gradient of the inputs is wrong: which weight was there in backward?"
    if held := _held(layers):
        return f"after its backward the weight of layer {held} is still whole: {_RESIZE}"
    if any(layer.weight.grad is not None for layer in layers):
        return "the whole gradient is still there: set weight.grad to None when it is sent."
    gathers = [call for call in log.calls if call.name.startswith("all_gather")]
    scatters = [call for call in log.calls if call.name.startswith("reduce_scatter")]
    if log.named("all_reduce"):
        return (
            "it all-reduces the gradient, so each rank gets all of it: reduce_scatter gives "
            "each rank the sum of its own part only."
        )
    if not scatters:
        return (
            "nothing is reduced in backward: each rank's gradient is of its own rows of the batch, "
            "and reduce_scatter adds them up, and leaves to each rank its part."
        )
    if (len(gathers), len(scatters)) != (2, 2):
        sentence = f"{counted(len(gathers), 'all-gather')} and {len(scatters)} reduce-scatter"
        return f"{sentence} in the backward of two layers: one of each a layer is enough."
    return ""


def _wrong_part_gradient(own: nn.Parameter, local: Tensor, total: Tensor) -> str:
    """Say what is wrong with the gradient of this rank's part; an empty text if nothing is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if own.grad is None:
        return "this rank's part has no gradient: after the reduce-scatter, set own.grad."
    gradient, sums = own.grad.flatten(), total.flatten().chunk(size)[rank]
    if close(gradient, sums / size):
        return ""
    if close(gradient, sums):
        return "the part's gradient is the sum over the ranks, and should be the mean: divide."
    if close(gradient, local.flatten().chunk(size)[rank]):
        return "the part's gradient is this rank's alone: a reduce-scatter adds the others'."
    return "the part's gradient is not the mean over the ranks of chunk r, for rank r."


def _gradient(tensor: Tensor) -> Tensor:
    """Return a tensor's gradient; an empty tensor if there is none."""
    return torch.empty(0) if tensor.grad is None else tensor.grad


_HINTS = {
    "out of bounds for storage of size 0": (
        "A weight was used while it had no memory: gather it before forward, and again before "
        "backward (register_full_backward_pre_hook)."
    ),
    "modified by an inplace operation": (
        "Autograd counts the writes into a tensor that it has saved: gather into weight.data, "
        "which it does not watch."
    ),
    "a leaf Variable that requires grad": (
        "Autograd refuses writes into a parameter: gather into weight.data."
    ),
    "is a view and is being modified inplace": (
        "Autograd refuses writes into a parameter: gather into views of weight.data."
    ),
    "SIGSEGV": (
        "A weight was used while it had no memory: gather it before forward, and again before "
        "backward (register_full_backward_pre_hook)."
    ),
}

JUDGE = judge_on_ranks(_trial, _HINTS)
