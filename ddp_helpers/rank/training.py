"""One epoch of training, and one exact evaluation. Both return sums, so that ranks can add theirs up."""

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_helpers.rank.data import Batches


def count(output: Tensor, labels: Tensor) -> Tensor:
    """[loss, correct, samples] of a batch, as sums: averages over unequal shards would not add up."""
    loss = F.nll_loss(output, labels, reduction="sum")
    return torch.stack([loss, (output.argmax(dim=1) == labels).sum(), loss.new_tensor(len(labels))]).double()


def exposed(model: nn.Module) -> float:
    """Seconds of an average step in which backward had nothing left to do but wait for other ranks' gradients.

    DDP measures it itself, at some of its steps. Without DDP nothing waits.
    """
    measured = model._get_ddp_logging_data() if hasattr(model, "_get_ddp_logging_data") else {}
    waits = measured.get("avg_backward_comm_time", 0) - measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, waits) / 1e9


def train_epoch(model: nn.Module, optimizer: Optimizer, batches: Batches, args: Namespace, title: str) -> Tensor:
    """One pass over this rank's batches; every rank calls it. Returns its [loss, correct, samples], as sums.

    A rank that has a title prints a progress bar under it every args.log_interval batches.
    """
    model.train()
    sums = batches.sums = torch.zeros(3, dtype=torch.float64, device=batches.device)
    for step, (images, labels) in enumerate(batches, 1):
        optimizer.zero_grad()
        with torch.autocast(batches.device.type, torch.bfloat16, enabled=args.bf16):
            output = model(images)
            loss = F.nll_loss(output, labels)
        loss.backward()
        optimizer.step()
        sums += count(output.detach(), labels)
        if title and (step % args.log_interval == 0 or step == len(batches)):
            bar = "#" * (20 * step // len(batches))
            print(f"{title} [{bar:.<20}] {step}/{len(batches)} loss {loss.item():.4f}", flush=True)
        if args.dry_run:
            break
    batches.exposed = step * exposed(model)
    return sums


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> Tensor:
    """[loss, correct, samples] over this rank's test batches; the ranks may hold different numbers of them."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=batches.device)
    for images, labels in batches:
        sums += count(model(images), labels)
    return sums
