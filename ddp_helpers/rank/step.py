"""The training step whose parts the notebooks time and change one by one: 01's ladder, 05's cost."""

import logging
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_helpers.rank.data import Batches

Work = Callable[[Tensor, Tensor], Tensor | None]  # what is done with images and labels


def count(output: Tensor, labels: Tensor) -> Tensor:
    """[loss, correct, samples] of a batch, as sums: averages over unequal shards would not add up."""
    loss = F.nll_loss(output, labels, reduction="sum")
    return torch.stack([loss, (output.argmax(dim=1) == labels).sum(), torch.full_like(loss, len(labels))]).double()


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
        return self.take(images, labels)

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


def train_epoch(step: Step, batches: Batches) -> None:
    """Train one pass over the batches."""
    step.model.train()
    for images, labels in batches:
        step(images, labels)
