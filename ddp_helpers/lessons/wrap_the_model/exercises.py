"""The exercises of notebook 05: find drifted parameters, average in one call, accumulate gradients.

Each function is the trial of the exercise that has its name. `lessons.check` runs it on every rank
of a `%%ranks` cell.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import device, on_real_ranks, random_numbers


def _small_model() -> nn.Sequential:
    """Make a model with the same weights on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double().to(device())


def drifted(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the names whose numbers are in a different order on the last rank."""
    for swapped, one_bit in (([], False), (["1.weight"], False), (["0.weight", "1.bias"], True)):
        model = _small_model()
        if dist.get_rank() == dist.get_world_size() - 1:
            for name in swapped:
                numbers = model.get_parameter(name).data
                numbers.copy_(_one_bit_off(numbers) if one_bit else numbers.flip(0))
        before = parameters_to_vector(model.parameters()).clone()
        yield Comparison("the names", answer(model), swapped, {_SUMS_ARE_EQUAL: []})
        after = parameters_to_vector(model.parameters())
        yield Comparison("the parameters, which it should only read", after, before)


def _one_bit_off(tensor: Tensor) -> Tensor:
    """Copy a tensor, with the last bit of each number changed."""
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


_SUMS_ARE_EQUAL = (
    "Numbers were swapped on the last rank: their sum is the same, and every rank needs the answer."
)


def average_in_one(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare with the gradients that DDP averages; the second time a layer is frozen."""
    for frozen in (False, True):
        models = [_small_model() for _ in range(2)]
        for model in models:
            model[0].requires_grad_(not frozen)
        model, reference = models[0], DDP(models[1])
        images = random_numbers(dist.get_rank(), 8, 6)
        for each in (model, reference):
            each(images).square().sum().backward()
        local = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        answer(model)
        yield Comparison("collectives called", log.names(), ["all_reduce"])
        for name, parameter in model.named_parameters():
            expected = reference.module.get_parameter(name).grad
            known = {_NOT_IN_GRAD: local.get(name)}
            yield Comparison(f"the gradient of {name}", parameter.grad, expected, known)


_NO_GRAD = "A frozen layer has no gradient: its p.grad is None."
_NOT_IN_GRAD = "The gradient is as it was: the mean is not in p.grad."
_FROZEN = {"'NoneType' object has no attribute": _NO_GRAD, "Expected parameter `tensor`": _NO_GRAD}


def accumulate(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare two steps over micro-batches of 8, 8 and 4 images with DDP's over full batches."""
    model, reference = DDP(_small_model()), DDP(_small_model())
    all_reduces: list[int] = []
    model.register_comm_hook(all_reduces, _counted)
    optimizer, plain = (SGD(each.parameters(), lr=0.5) for each in (model, reference))
    for step in (1, 2):
        images = random_numbers(10 * step + dist.get_rank(), 20, 6)
        labels = torch.arange(20, device=images.device) % 4
        pieces = list(zip(images.split(8), labels.split(8), strict=True))
        answer(model, optimizer, pieces)
        plain.zero_grad()
        F.cross_entropy(reference(images), labels).backward()
        plain.step()
        known: dict[str, Any] = {_TOO_MANY: step * len(pieces), _TOO_FEW: 0}
        yield Comparison(f"all-reduces up to step {step}", len(all_reduces), step, known)
        weights = parameters_to_vector(model.parameters())
        known = {_QUESTIONS[step]: weights}
        expected = parameters_to_vector(reference.parameters())
        yield Comparison(f"the weights after step {step}", weights, expected, known)


def _counted(calls: list[int], bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket as DDP does, and note it; DDP calls it as its hook."""
    calls.append(bucket.index())
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


_TOO_MANY = "Forward and backward of every micro-batch but the last belong inside no_sync()."
_TOO_FEW = "The last micro-batch belongs outside no_sync(), forward and backward: it sends the sum."
_QUESTIONS = {
    1: "The micro-batches have 8, 8 and 4 images: what part of the mean is each?",
    2: "The first step was right: are its gradients still there?",
}

EXERCISES = [
    on_real_ranks(drifted),
    on_real_ranks(average_in_one, _FROZEN),
    on_real_ranks(accumulate),
]
