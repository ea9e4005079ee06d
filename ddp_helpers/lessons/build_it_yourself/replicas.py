"""Exercises 2 and 3 of notebook 16: DDP by hand, and gradients that leave while backward computes.

`exercises.py` takes the judges; the trials run on every rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

_ROWS, _RATE = 4, 0.3  # rows of a batch on each rank, and the learning rate


def wrong_gradient(name: str, gradient: Tensor, local: Tensor, total: Tensor) -> str:
    """Say what is wrong with a gradient that should be a mean; an empty text if nothing is.

    local: what backward left on this rank; total: the sum of these over the ranks.
    """
    size = dist.get_world_size()
    if close(gradient, total / size):
        return ""
    place = f"the gradient of {name}"
    if close(gradient, total):
        return f"{place} is the sum over the ranks, and should be the mean: nothing divides it."
    if close(gradient, total / size**2):
        return f"{place} is the mean divided by {size} once more: divide once."
    if close(gradient, local):
        return f"{place} is as backward left it: the mean over the ranks is not in p.grad."
    if close(gradient, local / size):
        return f"{place} is divided, but nothing was added: the mean needs all ranks' gradients."
    return (
        f"{place} is not the mean over the ranks. Does each piece go back to its own parameter, "
        "in the same order on all ranks?"
    )


# ---- 2: DDP by hand


class _Net(nn.Module):
    """A model with a buffer that its output depends on."""

    scale: Tensor

    def __init__(self, seed: int, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 5, dtype=torch.float64).requires_grad_(not frozen)
        self.last = nn.Linear(5, 4, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(1.0 + seed, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def _ddp_trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Train two steps, with all layers and with a frozen one, beside one process.

    Every rank calls it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for frozen in (False, True):
        model, reference = _Net(rank, frozen), _Net(0, frozen)
        with log.listening():
            average: Any = answer(model)
        yield _wrong_start(model, reference)
        if not callable(average):
            yield "it returns no function: return the one that is to be called after backward."
        for step in range(2):
            inputs = random_numbers(step, size * _ROWS, 6)
            own = inputs[rank * _ROWS : (rank + 1) * _ROWS]
            yield _wrong_step(model, average, log, own)
            reference.zero_grad()
            reference(inputs).square().mean().backward()
            _take_step(model)
            _take_step(reference)
            yield _wrong_weights(model, reference)


def _wrong_start(model: nn.Module, reference: nn.Module) -> str:
    """Say which tensor is not rank 0's after the start; an empty text if all are."""
    buffers = dict(model.named_buffers())
    for name, tensor in model.state_dict().items():
        if torch.equal(tensor, reference.state_dict()[name]):
            continue
        if name in buffers:
            return f"the buffer {name} is not rank 0's: buffers are sent as parameters are."
        if not model.get_parameter(name).requires_grad:
            reason = "a frozen parameter has no gradient, but takes part in forward: send it, too."
            return f"the parameter {name} is not rank 0's: {reason}"
        return f"the parameter {name} is not rank 0's: nothing has sent it from rank 0."
    return ""


def _wrong_step(model: nn.Module, average: Callable, log: CallLog, inputs: Tensor) -> str:
    """Let a rank compute and average gradients; say what is wrong with them."""
    model.zero_grad()
    model(inputs).square().mean().backward()
    trained = [(n, p, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None]
    totals = [sum_of_all(local) for _, _, local in trained]
    with log.listening():
        average()
    for (name, parameter, local), total in zip(trained, totals, strict=True):
        if mistake := wrong_gradient(name, _gradient(parameter), local, total):
            return mistake
    messages = len(log.calls)
    if messages != len(trained):
        sentence = f"{counted(messages, 'message')} for {counted(len(trained), 'gradient')}"
        return f"{sentence}: this exercise asks for one all-reduce a gradient."
    return ""


def _gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient; an empty tensor if there is none any more."""
    return torch.empty(0) if parameter.grad is None else parameter.grad


def _take_step(model: nn.Module) -> None:
    """Take a step of plain gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(_RATE * parameter.grad)


def _wrong_weights(model: nn.Module, reference: nn.Module) -> str:
    """Say which parameter one process would have otherwise; an empty text if none."""
    for name, tensor in reference.state_dict().items():
        if not close(model.state_dict()[name], tensor):
            return f"after a step, {name} is not what one process with the whole batch has."
    return ""


DDP_HINTS = {
    "NoneType": (
        "A frozen layer has no gradient: its p.grad is None. Leave such parameters out, on all "
        "ranks alike."
    ),
    "a leaf Variable that requires grad": (
        "torch.distributed writes into the tensor: give it parameter.data, which autograd does "
        "not watch."
    ),
}

# ---- 3: buckets that leave during backward


_CASES = ((False, 25), (False, 40), (True, 1000), (True, 10))  # a frozen layer, numbers in a bucket


def _layers(frozen: bool) -> nn.Sequential:
    """Make a model of four weights, of 30, 20, 16 and 12 numbers, the same on every rank."""
    torch.manual_seed(5)
    widths = (6, 5), (5, 4), (4, 4), (4, 3)
    linears = [nn.Linear(*width, bias=False, dtype=torch.float64) for width in widths]
    linears[0].requires_grad_(not frozen)
    return nn.Sequential(*linears)


def _buckets_trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Try small and large buckets for two steps each; every rank calls it."""
    for frozen, bucket_size in _CASES:
        model, plain = _layers(frozen), _layers(frozen)
        for parameter in model.parameters():
            if parameter.requires_grad:  # before the answer's hooks, so that it runs first
                parameter.register_post_accumulate_grad_hook(_note_ready(log))
        finish: Any = answer(model, bucket_size)
        for step in (1, 2):
            inputs = random_numbers(10 * step + dist.get_rank(), _ROWS, 6)
            targets = random_numbers(step, _ROWS, 3)
            model.zero_grad()
            plain.zero_grad()
            F.mse_loss(plain(inputs), targets).backward()
            totals = {n: sum_of_all(_gradient(p)) for n, p in _trained(plain)}
            with log.listening():
                F.mse_loss(model(inputs), targets).backward()
                log.events.append("backward ends")
                finish()
            mistake = _wrong_buckets(log, bucket_size) or _wrong_means(model, plain, totals)
            yield f"in step {step}, {mistake}" if mistake else ""


def _note_ready(log: CallLog) -> Callable[[Tensor], None]:
    """Make a hook that notes in the log that a gradient is ready, and how large it is."""
    return lambda parameter: log.events.append(f"ready {parameter.numel()}")


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the parameters that are not frozen, with their names."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def _wrong_means(model: nn.Module, plain: nn.Module, totals: dict[str, Tensor]) -> str:
    """Say which gradient is not the mean; an empty text if all are."""
    for name, parameter in _trained(model):
        local = _gradient(plain.get_parameter(name))
        if mistake := wrong_gradient(name, _gradient(parameter), local, totals[name]):
            return mistake
    return ""


def expected_buckets(ready: list[int], bucket_size: int) -> list[int]:
    """Compute the sizes of buckets from those of the gradients, in the order of readiness."""
    buckets, filling = [], 0
    for numbers in ready:
        filling += numbers
        if filling >= bucket_size:
            buckets.append(filling)
            filling = 0
    return buckets + [filling] * (filling > 0)


def _wrong_buckets(log: CallLog, bucket_size: int) -> str:
    """Say what is wrong with what left, and when; an empty text if nothing is."""
    marks = [event for event in log.events if isinstance(event, str)]
    ready = [int(mark.split()[1]) for mark in marks if mark.startswith("ready")]
    sizes = [call.numbers for call in log.calls]
    if others := [call.name for call in log.calls if call.name != "all_reduce"]:
        return f"it calls dist.{others[0]}; all_reduce is what a bucket needs."
    if log.never_waited():
        return "nothing waits for a bucket: before wait() has returned, its sums are not there."
    if log.waits_for_earlier:
        return "it waits for buckets of an earlier step: forget them when finish() is done."
    expected = expected_buckets(ready, bucket_size)
    if sizes != expected:
        return _wrong_sizes(sizes, expected, ready, bucket_size)
    return _wrong_moments(log, bucket_size)


def _wrong_sizes(sizes: list[int], expected: list[int], ready: list[int], limit: int) -> str:
    """Say in which way the buckets are too many, too few or of other sizes."""
    sentence = (
        f"gradients of {ready} numbers became ready in this order, buckets are full at {limit}: "
        f"messages of {sizes} numbers left, and should be {expected}."
    )
    if sum(sizes) < sum(ready):
        return f"{sentence} The last bucket is not full, and nobody sends it: finish() has to."
    if sum(sizes) > sum(ready):
        return f"{sentence} Some gradients left twice: empty the bucket when it leaves."
    if sizes == ready:
        return f"{sentence} Each gradient left alone: collect them until the bucket is full."
    return f"{sentence} A bucket leaves as soon as it holds {limit} numbers or more."


def _wrong_moments(log: CallLog, bucket_size: int) -> str:
    """Say which bucket left too late, or was waited for too early; an empty text if none."""
    end = log.events.index("backward ends")
    before_end = log.events[:end]
    if any(str(event).startswith("waited") for event in before_end):
        return (
            "it waits for a bucket while backward has layers left to compute: start the "
            "all-reduce with async_op=True, keep what it returns, and wait in finish()."
        )
    full, filling = 0, 0
    for event in before_end:
        if str(event).startswith("ready"):
            left = sum(isinstance(before, int) for before in before_end[: before_end.index(event)])
            if left < full:
                return _LATE
            filling += int(str(event).split()[1])
            if filling >= bucket_size:
                full, filling = full + 1, 0
    if sum(isinstance(event, int) for event in before_end) < full:
        return _LATE
    return ""


_LATE = (
    "a full bucket has not left when the next gradient is ready, so nothing overlaps: the hook "
    "that makes it full also starts its all-reduce."
)
_BUCKET_HINTS = {
    "doesn't require gradient": (
        "A frozen parameter takes no hook: no gradient of it ever becomes ready."
    ),
    "cannot register a hook": (
        "A frozen parameter takes no hook: no gradient of it ever becomes ready."
    ),
    "non-empty list": "There may be nothing left for finish() to send.",
    "at least one": "There may be nothing left for finish() to send.",
    **DDP_HINTS,
}

DDP_JUDGE = judge_on_ranks(_ddp_trial, DDP_HINTS)
BUCKETS_JUDGE = judge_on_ranks(_buckets_trial, _BUCKET_HINTS)
