"""Exercises 2, 3 and 5 of notebook 16: DDP by hand, overlap, a sharded layer.

Each function is the trial of the exercise that has its name; it runs on every rank, and compares
with what PyTorch's own DDP and FSDP give on the same ranks.
"""

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison, at_most
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import device, random_numbers

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
        self.to(device())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def ddp_by_hand(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare two steps with DDP's, once with all layers, once with a frozen one."""
    rank = dist.get_rank()
    for frozen in (False, True):
        model, reference = _Net(rank, frozen), DDP(_Net(rank, frozen))
        optimizers = [SGD(each.parameters(), lr=0.3) for each in (model, reference)]
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        average: Any = answer(model)
        for step in (1, 2):
            for name, tensor in model.state_dict().items():
                expected, known = reference.module.state_dict()[name], {_NOT_SENT: own[name]}
                yield Comparison(f"{name} before step {step}", tensor, expected, known)
            for each in (model, reference):
                each.zero_grad()
                inputs = random_numbers(10 * step + rank, 4, 6)
                each(inputs).square().mean().backward()
            local = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            with log.listening():
                average()
            for name, parameter in model.named_parameters():
                expected = reference.module.get_parameter(name).grad
                known = {_LOCAL: local.get(name)}
                yield Comparison(f"the gradient of {name}", parameter.grad, expected, known)
            yield Comparison("messages after backward", len(log.calls), len(local))
            for optimizer in optimizers:
                optimizer.step()


_NOT_SENT = (
    "The tensor is as this rank made it. Rank 0 sends all that forward uses: parameters, "
    "even frozen ones, and buffers."
)
_LOCAL = "The gradient is as backward left it: the mean over the ranks is not in p.grad."
DDP_HINTS = {
    "Expected parameter `tensor`": (
        "A frozen layer has no gradient: its p.grad is None. Leave such parameters out on all "
        "ranks."
    ),
}

# ---- 3: buckets that leave during backward


def _layers(frozen: bool) -> nn.Sequential:
    """Make a model of four weights, of 30, 20, 16 and 12 numbers, the same on every rank."""
    torch.manual_seed(5)
    widths = (6, 5), (5, 4), (4, 4), (4, 3)
    linears = [nn.Linear(*width, bias=False, dtype=torch.float64) for width in widths]
    linears[0].requires_grad_(not frozen)
    return nn.Sequential(*linears).to(device())


def overlap(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare two steps with DDP's, of small and of large buckets; and when each bucket left."""
    for frozen, bucket_size in ((False, 25), (False, 28), (False, 40), (True, 1000), (True, 10)):
        model, reference = _layers(frozen), DDP(_layers(frozen))
        for parameter in model.parameters():
            if parameter.requires_grad:  # before the answer's hooks, so that it runs first
                parameter.register_post_accumulate_grad_hook(_note_ready(log))
        finish: Any = answer(model, bucket_size)
        for step in (1, 2):
            inputs = random_numbers(10 * step + dist.get_rank(), 4, 6)
            targets = random_numbers(step, 4, 3)
            for each in (model, reference):
                each.zero_grad()
            F.mse_loss(reference(inputs), targets).backward()
            with log.listening():
                F.mse_loss(model(inputs), targets).backward()
                log.events.append(_END)
                finish()
            yield from _what_left_when(log, bucket_size)
            for name, parameter in model.named_parameters():
                expected = reference.module.get_parameter(name).grad
                yield Comparison(
                    f"in step {step}, the gradient of {name}", parameter.grad, expected
                )


def _note_ready(log: CallLog) -> Callable[[Tensor], None]:
    """Make a hook that logs that a gradient is ready, and its size."""
    return lambda parameter: log.events.append(f"ready: {parameter.numel()} numbers")


def _what_left_when(log: CallLog, bucket_size: int) -> Iterator[Comparison]:
    """Compare the order in which gradients became ready and buckets left, and the waits.

    The order is judged by the gradients that became ready, since a frozen layer changes it.
    """
    before_end = list(takewhile(lambda event: event != _END, log.events))
    yield at_most("waits during backward", before_end.count("wait"), 0, _NO_WAIT)
    expected, filling = [], 0
    ready = [int(event.split()[1]) for event in before_end if event.startswith("ready")]
    for numbers in ready:
        expected.append(f"ready: {numbers} numbers")
        filling += numbers
        if filling >= bucket_size:
            expected.append(f"all_reduce of {filling} numbers")
            filling = 0
    expected += [_END, *[f"all_reduce of {filling} numbers"] * (filling > 0)]
    got = [event for event in log.events if event != "wait"]
    late = sorted(expected, key=lambda event: (event.startswith("all_reduce"), event == _END))
    known = {_AT_THE_END: late}
    yield Comparison(f"what left when, with buckets of {bucket_size}", got, expected, known)
    waits = log.never_waited()
    yield Comparison("calls that nobody waits for", waits, [], {_NO_SUMS: waits})
    what = "waits for buckets of an earlier step"
    yield at_most(
        what, log.waits_for_earlier, 0, "Empty the list of what has left when finish() is done."
    )


_END = "backward ends"
_NO_SUMS = "A bucket has its sums only after wait(): call it in finish()."
_NO_WAIT = (
    "Something waits while backward has layers left to compute: start the all-reduce with "
    "async_op=True, keep what it returns, and wait in finish()."
)
_AT_THE_END = (
    "A full bucket has not left when the next gradient is ready, so nothing overlaps: the hook "
    "that fills it must also start its all-reduce."
)
_TOO_EARLY = "This hook runs before the gradient is there: use register_post_accumulate_grad_hook."
OVERLAP_HINTS = {
    "doesn't require gradient": "A frozen parameter takes no hook: it never gets a gradient.",
    "cannot register a hook": "A frozen parameter takes no hook: it never gets a gradient.",
    "non-empty list": "There may be nothing left for finish() to send.",
    "split_sizes": "Keep a copy of the list of parameters: this list is emptied with the bucket.",
    "'NoneType' object has no attribute 'numel'": _TOO_EARLY,
    "'NoneType' object has no attribute 'flatten'": _TOO_EARLY,
}

# ---- 5: a layer that is gathered only while it computes


def shard_layer(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare two steps of two layers with FSDP's, and look at storage and messages."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    layers, reference = _two_layers(), _two_layers()
    storages = [layer.weight.untyped_storage() for layer in layers]  # which autograd would keep
    for layer in reference:
        fully_shard(layer, mesh=mesh)
    owned: list[Any] = [answer(layer) for layer in layers]
    for own, layer in zip(owned, reference, strict=True):
        yield Comparison("what it returns", type(own).__name__, "Parameter")
        size = own.numel() * own.element_size()
        behind = own.untyped_storage().nbytes()
        yield Comparison("bytes of storage of this rank's part", behind, size, {_VIEW: behind})
        yield Comparison("this rank's part", own.flatten(), _part(layer.weight))
    yield from _freed(storages, "after sharding")
    for step in (1, 2):
        inputs, plain_inputs = (
            random_numbers(10 * step + dist.get_rank(), 4, 6).requires_grad_(step == 1)
            for _ in range(2)
        )
        with log.listening():
            hidden = layers[0](inputs)
            held = storages[0].nbytes()
            output = layers[1](torch.tanh(hidden))
        expected = reference[1](torch.tanh(reference[0](plain_inputs)))
        yield Comparison(f"in step {step}, the output", output, expected)
        yield at_most("bytes of layer 1's weight while layer 2 computes", held, 0, _RESIZE)
        yield from _freed(storages, "after forward")
        yield Comparison("messages in forward", _kinds(log), ["all_gather"] * 2)
        expected.square().mean().backward()
        with log.listening():
            output.square().mean().backward()
        yield Comparison("messages in backward", _kinds(log), _IN_BACKWARD, _KNOWN_MESSAGES)
        yield Comparison("the gradient of the inputs", inputs.grad, plain_inputs.grad)
        yield from _freed(storages, "after backward")
        for own, layer, whole in zip(owned, layers, reference, strict=True):
            yield Comparison("layer.weight.grad after backward", layer.weight.grad, None)
            gradient = None if own.grad is None else own.grad.flatten()
            yield Comparison("the gradient of this rank's part", gradient, _part(whole.weight.grad))
            with torch.no_grad():
                own -= 0.3 * own.grad
                whole.weight.sub_(whole.weight.grad, alpha=0.3)  # type: ignore[arg-type]  # is there
            own.grad = whole.weight.grad = None


def _two_layers() -> list[nn.Linear]:
    """Make two layers of 36 and 72 weights, whose rows two and three ranks can shard evenly."""
    torch.manual_seed(8)
    return [nn.Linear(6, out, bias=False, dtype=torch.float64).to(device()) for out in (6, 12)]


def _part(tensor: Any) -> Tensor:
    """Return this rank's rows of a tensor that FSDP has sharded, flat."""
    assert isinstance(tensor, DTensor), "fully_shard has sharded it"
    return tensor.to_local().detach().flatten()


def _freed(storages: list[torch.UntypedStorage], when: str) -> Iterator[Comparison]:
    """Compare the memory of the full weights with none."""
    for number, storage in enumerate(storages, 1):
        yield at_most(f"bytes of layer {number}'s weight {when}", storage.nbytes(), 0, _RESIZE)


def _kinds(log: CallLog) -> list[str]:
    """List the messages, without the name endings that say how they take their tensors."""
    kinds = ("all_gather", "reduce_scatter")
    return sorted(next((k for k in kinds if name.startswith(k)), name) for name in log.names())


_IN_BACKWARD = ["all_gather"] * 2 + ["reduce_scatter"] * 2
_KNOWN_MESSAGES = {
    "An all-reduce gives each rank the full gradient: reduce_scatter gives each its part.": (
        ["all_gather"] * 2 + ["all_reduce"] * 2
    ),
    "Each rank's gradient is of its own rows of the batch: reduce_scatter adds them up.": (
        ["all_gather"] * 2
    ),
}
_RESIZE = "Free it with weight.untyped_storage().resize_(0), which keeps the tensor's shape."
_VIEW = "This rank's part is a view of the full weight, and shares its memory: clone the part."
_NO_MEMORY = (
    "A weight was used while it had no memory: gather it before forward, and again before backward "
    "(register_full_backward_pre_hook)."
)
_UNWATCHED = (
    "Autograd counts the writes into a tensor that it has saved: gather into weight.data, which it "
    "does not watch."
)
LAYER_HINTS = {
    "out of bounds for storage of size 0": _NO_MEMORY,
    "out of bounds for storage of size": "resize_ takes bytes: numbers times element_size().",
    "SIGSEGV": _NO_MEMORY,
    "modified by an inplace operation": _UNWATCHED,
    "is being modified inplace": _UNWATCHED,
}
