"""Exercises 1 and 8 of notebook 16, which send to neighbours: a ring, and a pipeline.

Each function is the trial of the exercise that has its name; it runs on every rank.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_helpers.lessons.calls import COLLECTIVES, Call, CallLog
from ddp_helpers.lessons.comparison import Comparison, at_most, explanations
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import KEEP_AND_WAIT, random_numbers, sum_of_all

_WAIT = (
    f"{KEEP_AND_WAIT} Until then a received tensor has no contents, and a sent one must not change."
)


def _sends_and_receives(log: CallLog) -> Iterator[Comparison]:
    """Compare an answer's calls with those that neighbours need."""
    yield Comparison("collectives called", log.names(*COLLECTIVES), [])
    waits = log.never_waited()
    yield Comparison("calls that nobody waits for", waits, [], {_WAIT: waits})


# ---- 1: a sum over all ranks that goes round a ring


def ring_sum(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare with an all-reduce: equal chunks, unequal ones, and on three ranks an empty one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in (12, 7, 2):
        tensor = random_numbers(rank, length)
        before, total = tensor.clone(), sum_of_all(tensor)
        when_sent: list[Tensor] = []  # the tensor as it was when each send started
        log.at_call = partial(_keep_at_send, tensor, when_sent)
        answer(tensor)
        yield from _sends_and_receives(log)
        most = 2 * (size - 1) * -(-length // size)
        yield at_most("numbers sent", log.numbers("send", "isend"), most, _WHOLE_TENSORS)
        known = {
            _IN_PLACE: before,
            _SECOND_HALF: _after_one_half(total, before),
            _ADDED: _after_one_half(total, before + total),
        }
        compared = Comparison(f"the tensor of {length} numbers", tensor, total, known)
        if len(when_sent) == 2 * (size - 1) and not explanations(compared):
            known[_half(when_sent[size - 1], total)] = tensor
        yield compared


def _keep_at_send(tensor: Tensor, kept: list[Tensor], call: Call) -> None:
    """Keep a copy of the tensor whenever a send starts."""
    if call.name in ("send", "isend"):
        kept.append(tensor.clone())


def _half(tensor: Tensor, total: Tensor) -> str:
    """Return a hint on whether the first half was right, from the tensor when the second starts.

    Then one chunk holds its complete sum.
    """
    size = dist.get_world_size()
    chunks = zip(tensor.tensor_split(size), total.tensor_split(size), strict=True)
    right = any(len(own) and torch.allclose(own, whole) for own, whole in chunks)
    return _FIRST_RIGHT if right else _FIRST_WRONG


def _after_one_half(total: Tensor, others: Tensor) -> Tensor:
    """Make a tensor with the sum in one chunk, on two ranks as after the first half."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(others.tensor_split(size))
    number = (rank + 1) % size
    chunks[number] = total.tensor_split(size)[number]
    return torch.cat(chunks)


_WHOLE_TENSORS = (
    "In a ring each message holds one chunk, and there are 2 (n - 1) messages: are these full "
    "tensors, or more messages?"
)
_IN_PLACE = (
    "The tensor is as it was. Work on chunks of the tensor itself: they are views, and what is "
    "written into a view is in the tensor."
)
_SECOND_HALF = (
    "After the first n - 1 steps each rank has one complete sum. In the next n - 1 steps, complete "
    "sums travel on, and replace the old chunks."
)
_ADDED = (
    "A chunk holds the complete sum plus this rank's numbers. In the second half complete sums "
    "arrive: let them replace the old chunk; do not add them."
)
_FIRST_RIGHT = (
    "The first half is right: after n - 1 steps this rank had the full sum of one chunk. Look at "
    "the second half: which chunk does it send on, and into which does it receive?"
)
_FIRST_WRONG = (
    "The first half is wrong already: after n - 1 steps no chunk held its full sum. Which chunk "
    "does each step send, and to which does it add?"
)
RING_HINTS = {
    "index out of range": (
        "torch.chunk(tensor, n) may give fewer than n chunks; torch.tensor_split gives n, some of "
        "which may be empty. Or is a % n missing?"
    ),
}

# ---- 8: a model whose stages are on different ranks, in two orders of work

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
    """Make a stage, the same on every rank."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()


def pipeline_step(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare with all stages in one process: all forward first, then one by one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count, one_by_one in ((4, False), (4, True), (1, True)):
        inputs = [random_numbers(number, *_SHAPE) for number in range(count)]
        labels = [random_numbers(100 + number, *_SHAPE) for number in range(count)]
        model = nn.Sequential(*map(_stage, range(size)))
        for pair in zip(inputs, labels, strict=True):
            (F.mse_loss(model(pair[0]), pair[1]) / count).backward()
        stage = _Stage(rank)
        nothing = [torch.full(_SHAPE, torch.nan).double() for _ in range(count)]
        own_inputs = inputs if rank == 0 else nothing
        own_labels = labels if rank == size - 1 else nothing
        answer(stage.layers, own_inputs, own_labels, one_by_one)
        yield from _sends_and_receives(log)
        order = f"one_by_one={one_by_one}, {count} micro-batches"
        for peer in (rank + 1, rank - 1):
            sent = [call for call in log.calls if call.peer == peer and call.name.endswith("send")]
            expected = count if 0 <= peer < size else 0
            yield Comparison(f"{order}: messages to rank {peer}", len(sent), expected)
        for name, parameter in stage.layers.named_parameters():
            right = model[rank].get_parameter(name).grad
            assert right is not None, "the full model has trained"
            known = {_NOT_DIVIDED: right * count}
            yield Comparison(f"{order}: the gradient of {name}", parameter.grad, right, known)
        yield Comparison(f"{order}: forwards of the stage", stage.forwards, count)
        most = min(count, size - rank) if one_by_one else count
        held = f"{order}: micro-batches held at once, between forward and backward"
        yield Comparison(held, stage.most_held, most, {_ORDER[one_by_one]: stage.most_held})


_NOT_DIVIDED = (
    "The loss is the mean over the micro-batches, so the last stage divides each by their number."
)
_ORDER = {
    True: (
        "The gradients are right, but the order is wrong: a stage goes forward n - 1 - rank "
        "times (once for each stage after it), then alternates, then goes back."
    ),
    False: "The gradients are right, but the order is wrong: all go forward first.",
}
PIPELINE_HINTS = {
    "a leaf Variable that requires grad": "Autograd needs x as it was: never change it in place.",
    "Expected parameter `tensor`": (
        "What arrives from the stage before needs requires_grad_(): otherwise backward leaves no "
        "x.grad to send back."
    ),
    "grad can be implicitly created only for scalar outputs": (
        "Only the last stage has a loss. The others give backward the gradient that came from the "
        "next stage: y.backward(gradient)."
    ),
    "does not require grad": "The graph is detached: send y.detach(), and call backward on y.",
}
