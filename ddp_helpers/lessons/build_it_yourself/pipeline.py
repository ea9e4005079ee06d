"""Exercise 8 of notebook 16: a model whose stages are on different ranks, in two orders of work.

`exercises.py` takes the judge; the trial runs on every rank.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_helpers.lessons.build_it_yourself.calls import COLLECTIVES, CallLog
from ddp_helpers.lessons.build_it_yourself.judge import (
    close,
    counted,
    judge_on_ranks,
    random_numbers,
)
from ddp_helpers.lessons.exercise import Answer

_CASES = ((4, False), (4, True), (1, True))  # micro-batches, and whether one by one
_SHAPE = (2, 4)  # rows and width of each micro-batch, at every stage


class _Stage:
    """A rank's part of the model, and how many micro-batches wait for their backward."""

    def __init__(self, number: int) -> None:
        self.layers = _stage(number)
        self.held = self.most_held = self.forwards = 0
        self.layers.register_forward_hook(self._forward_ended)

    def _forward_ended(self, _layers: nn.Module, _inputs: tuple, output: Tensor) -> None:
        self.forwards += 1
        self.held += 1
        self.most_held = max(self.held, self.most_held)
        if output.requires_grad:
            output.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: Tensor) -> None:
        self.held -= 1


def _stage(number: int) -> nn.Sequential:
    """Make a stage, the same wherever it is made."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()


def _trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Take a step with all forwards first, and one by one; every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count, one_by_one in _CASES:
        inputs = [random_numbers(number, *_SHAPE) for number in range(count)]
        labels = [random_numbers(100 + number, *_SHAPE) for number in range(count)]
        model = nn.Sequential(*map(_stage, range(size)))
        for pair in zip(inputs, labels, strict=True):
            (F.mse_loss(model(pair[0]), pair[1]) / count).backward()
        stage, nothing = _Stage(rank), [torch.full(_SHAPE, torch.nan).double()] * count
        own_inputs = inputs if rank == 0 else nothing
        own_labels = labels if rank == size - 1 else nothing
        with log.listening():
            answer(stage.layers, own_inputs, own_labels, one_by_one)
        order = "one by one" if one_by_one else "all forward first"
        mistake = (
            _wrong_messages(log, count)
            or _wrong_gradients(stage.layers, model[rank], count)
            or _wrong_order(stage, count, one_by_one)
        )
        yield f"{order}, micro-batches: {count}: {mistake}" if mistake else ""


def _wrong_messages(log: CallLog, count: int) -> str:
    """Say what is wrong with what was sent; an empty text if nothing is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if collectives := log.named(*COLLECTIVES):
        return f"it calls dist.{collectives[0].name}: stages talk to their neighbours only."
    if waits := log.never_waited():
        return (
            f"nothing waits for its {waits[0].text()}: keep what isend returns, and wait for all "
            "of them at the end of the step."
        )
    sends = log.named("send", "isend")
    for peer, what in ((rank + 1, "activations"), (rank - 1, "gradients")):
        sent = [call for call in sends if call.peer == peer]
        if 0 <= peer < size and len(sent) != count:
            times = counted(len(sent), "time")
            return f"it sends {what} {times} to rank {peer}, and there are {count} micro-batches."
    return ""


def _wrong_gradients(stage: nn.Module, expected: nn.Module, count: int) -> str:
    """Say what is wrong with the gradients of this stage; an empty text if nothing is."""
    for name, parameter in stage.named_parameters():
        gradient, right = parameter.grad, expected.get_parameter(name).grad
        assert right is not None, "the whole model has trained"
        if gradient is None:
            return f"{name} of this stage has no gradient: has backward reached it?"
        if close(gradient, right):
            continue
        if close(gradient, right * count):
            return (
                f"the gradient of {name} is {count} times too large: the loss is the mean over "
                "the micro-batches, so the last stage divides each by their number."
            )
        if torch.isnan(gradient).any():
            return (
                f"the gradient of {name} is NaN: only rank 0 has inputs, and only the last rank "
                "labels. The others' are NaN, and lend their shape."
            )
        return (
            f"the gradient of {name} is not that of one process. Does each gradient meet the "
            "micro-batch that it belongs to? The first that went forward is the first to go back, "
            "on every stage."
        )
    return ""


def _wrong_order(stage: _Stage, count: int, one_by_one: bool) -> str:
    """Say whether a stage held more micro-batches than its order needs, or fewer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if stage.forwards != count:
        return f"the stage was computed {stage.forwards} times for {count} micro-batches."
    expected = min(count, size - rank) if one_by_one else count
    held = f"this stage held {stage.most_held} at once, between forward and backward"
    if stage.most_held > expected:
        return (
            f"the gradients are right, but {held}, and {expected} would do: go forward "
            f"{counted(size - 1 - rank, 'time')} (once for each stage behind this one), then "
            "alternate, then go back."
        )
    if stage.most_held < expected:
        return f"the gradients are right, but {held}: all {expected} go forward first."
    return ""


_HINTS = {
    "NoneType": (
        "What arrives from the stage before needs requires_grad_(): else backward leaves no "
        "x.grad to send back."
    ),
    "grad can be implicitly created only for scalar outputs": (
        "Only the last stage has a loss. The others give backward the gradient that came from the "
        "next stage: y.backward(gradient)."
    ),
    "does not require grad": ("The graph is cut: send y.detach(), and call backward on y itself."),
    "backward through the graph a second time": (
        "Each micro-batch goes back once, through its own graph: what arrives is a new leaf."
    ),
}

JUDGE = judge_on_ranks(_trial, _HINTS)
