"""One training step, as fast as the device does it without losing accuracy, and what the device is asked for."""

import logging
import shutil
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_helpers.rank.topology import Topology, stop

Work = Callable[[Tensor, Tensor], Tensor | None]  # what is done with images and labels
UNITS = ("amx_bf16", "avx512_bf16", "arm_bf16")  # of a processor, as torch names them


def has_bf16(device: torch.device) -> bool:
    """Whether the device has units for bfloat16. Without them it is emulated, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(torch.cpu.get_capabilities().get(unit) for unit in UNITS)


def choose_speed(args: Namespace, me: Topology, device: torch.device) -> None:
    """Settle args.precision, and stop at what was asked for by name and cannot be had; every rank calls it."""
    if args.precision == "bf16" and not has_bf16(device):
        stop(f"--precision bf16: {device.type} has no units for it here, and would be slower: leave the flag out")
    if args.compile and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        stop("--compile: no C++ compiler is on the PATH (g++): install one, or leave the flag out")
    if not args.precision:
        args.precision = "bf16" if has_bf16(device) else "float32"
        if args.precision == "float32" and me.rank == 0:
            print(f"training in float32: {device.type} has no bfloat16 units here", flush=True)


def count(output: Tensor, labels: Tensor) -> Tensor:
    """[loss, correct, samples] of a batch, as sums: averages over unequal shards would not add up."""
    loss = F.nll_loss(output, labels, reduction="sum")
    return torch.stack([loss, (output.argmax(dim=1) == labels).sum(), loss.new_tensor(len(labels))]).double()


def in_memory(flag: str, work: Work, attempt: Work, images: Tensor, labels: Tensor) -> Tensor:
    """work(images, labels); where the memory does not hold them, stop with the flag, the batch and a size that fits."""
    size, left = len(images), len(images)
    try:
        return work(images, labels)
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one
        if "memory" not in str(error):
            raise
    while left := left // 2:  # after the except: its error held what the batch has allocated
        with suppress(RuntimeError):
            attempt(images[:left], labels[:left])
            break
    fits = f"{left} does" if left else "not even one image does: use another device, or a smaller model"
    stop(f"{flag} {size} does not fit into the memory of {images.device}; {fits}")


def compiled(function: Callable) -> Callable:
    """Compile a function at its first call, without the compiler's remarks about profiling and extensions."""
    torch._logging.set_logs(all=logging.ERROR)
    return torch.compile(function)


def record_once(optimizer: Optimizer, device: torch.device) -> None:
    """Let the update be compiled or recorded once: as a plain number, each new learning rate would need another."""
    for group in optimizer.param_groups:
        group |= {"capturable": True, "foreach": True, "lr": torch.as_tensor(group["lr"], device=device)}


class Step:
    """Forward, backward, update and count of one batch; every rank makes one, once DDP has wrapped the model.

    Asks the flags for the precision, --compile (on a CPU the optimizer alone: its eleven passes over the weights become
    one, while a compiled model is slower there). Stops where a batch does not fit into memory.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, args: Namespace) -> None:
        self.model, self.optimizer, self.bf16 = model, optimizer, args.precision == "bf16"
        on_gpu = next(model.parameters()).is_cuda
        self.forward = compiled(model) if args.compile and on_gpu else model
        self.update = compiled(optimizer.step) if args.compile else optimizer.step
        if args.compile:
            record_once(optimizer, next(model.parameters()).device)
        self.take = self.eager

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """[loss, correct, samples] of the batch before the update."""
        return in_memory("--batch-size", self.take, self.attempt, images, labels)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The batch's loss, averaged, and the scores."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.forward(images)
            return F.nll_loss(output, labels), output.detach()

    def eager(self, images: Tensor, labels: Tensor) -> Tensor:
        """The step itself."""
        self.optimizer.zero_grad()
        loss, output = self.loss(images, labels)
        loss.backward()
        self.update()
        return count(output, labels)

    def attempt(self, images: Tensor, labels: Tensor) -> None:
        """All of a step that takes memory, on this rank alone: DDP would wait for the others."""
        self.forward = getattr(self.model, "module", self.model)
        self.optimizer.zero_grad()
        self.loss(images, labels)[0].backward()
