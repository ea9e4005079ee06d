"""Exercise 4 of notebook 16: an optimizer whose state is cut over the ranks.

`exercises.py` takes the judge; the trial runs on every rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ddp_helpers.lessons.build_it_yourself.calls import CallLog
from ddp_helpers.lessons.build_it_yourself.judge import (
    close,
    judge_on_ranks,
    random_numbers,
)
from ddp_helpers.lessons.exercise import Answer

_SHAPES = [(3, 4), (4,), (2, 3), (3,), (5,)]


class _Factory:
    """Makes optimizers, and keeps them, so that their state can be counted."""

    def __init__(self) -> None:
        self.made: list[Optimizer] = []

    def __call__(self, parameters: list[Tensor]) -> Optimizer:
        self.made.append(Adam(parameters, lr=0.1))
        return self.made[-1]

    def numbers_held(self) -> int:
        """Count the numbers in the states of all optimizers, without those that count steps."""
        states = [state for optimizer in self.made for state in optimizer.state.values()]
        return sum(t.numel() for state in states for t in state.values() if t.dim() > 0)


def _trial(answer: Answer, log: CallLog) -> Iterator[str]:
    """Step five parameters, and two, of which on three ranks one rank owns none.

    Every rank calls it.
    """
    for count in (5, 2):
        shapes = _SHAPES[:count]
        replicas = [nn.Parameter(random_numbers(7, *shape)) for shape in shapes]
        reference = [nn.Parameter(p.detach().clone()) for p in replicas]
        optimizer, factory = Adam(reference, lr=0.1), _Factory()
        step: Any = answer(replicas, factory)
        for number in (1, 2):
            before = [p.detach().clone() for p in replicas]
            for place, pair in enumerate(zip(replicas, reference, strict=True)):
                for parameter in pair:
                    parameter.grad = random_numbers(20 * number + place, *parameter.shape)
            optimizer.step()
            with log.listening():
                step()
            mistake = _wrong_state(factory, replicas) or _wrong_numbers(log, replicas)
            mistake = mistake or _wrong_parameters(replicas, reference, before)
            yield f"after step {number}, {mistake}" if mistake else ""


def _wrong_state(factory: _Factory, parameters: list[nn.Parameter]) -> str:
    """Say whether a rank holds more state than its part needs; an empty text if not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    needed = 2 * sum(p.numel() for p in parameters[rank::size])
    if len(factory.made) > 1:
        return (
            f"there are {len(factory.made)} optimizers on this rank. Make one, before the first "
            "step: a new one has forgotten Adam's running means."
        )
    if factory.numbers_held() > needed:
        return (
            f"this rank holds {factory.numbers_held()} numbers of optimizer state, and its own "
            f"parameters need {needed}: give the optimizer those only. That is what ZeRO saves."
        )
    return ""


def _wrong_numbers(log: CallLog, parameters: list[nn.Parameter]) -> str:
    """Say whether something else than each parameter, once, was sent; an empty text if not."""
    if log.named("all_reduce", "reduce"):
        return (
            "it adds up over the ranks. Only the owner has the new parameter, and the others an "
            "old one: there is nothing to add, so broadcast the owner's."
        )
    total = sum(p.numel() for p in parameters)
    numbers = sum(call.numbers for call in log.named("broadcast"))
    if numbers > total:
        what = f"it broadcasts {numbers} numbers, and the parameters have {total}"
        return f"{what}: each is sent once, after its owner's step."
    return ""


def _wrong_parameters(
    parameters: list[nn.Parameter],
    reference: list[nn.Parameter],
    before: list[Tensor],
) -> str:
    """Say which parameter is not what one optimizer makes of it; an empty text if none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, (parameter, expected) in enumerate(zip(parameters, reference, strict=True)):
        owner = number % size
        if close(parameter.detach(), expected.detach()):
            continue
        old = torch.equal(parameter.detach(), before[number])
        if old and owner != rank:
            return (
                f"parameter {number} is as it was before. Rank {owner}, which owns it, has "
                "stepped it: the others need it from there, after the step."
            )
        if old:
            return (
                f"parameter {number} is as it was before, though this rank owns it: it was not "
                f"stepped, or an older one came back. The src of its broadcast is rank {owner}."
            )
        return f"parameter {number} is not what a step of one optimizer over all of them gives."
    return ""


_HINTS = {
    "empty parameter list": (
        "With more ranks than parameters some rank owns none: it makes no optimizer, and still "
        "receives."
    ),
    "'NoneType' object is not callable": "Return the function that takes the step.",
    "a leaf Variable that requires grad": (
        "torch.distributed writes into the tensor: give it parameter.data."
    ),
}

JUDGE = judge_on_ranks(_trial, _HINTS)
