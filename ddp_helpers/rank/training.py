"""One epoch of training, and one exact evaluation. Both return sums, so that ranks can add theirs up."""

from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_helpers.rank.data import Batches
from ddp_helpers.rank.step import Step, count, in_memory


def exposed(model: nn.Module) -> float:
    """Seconds of an average step in which backward had nothing left to do but wait for other ranks' gradients.

    DDP measures it itself, at some of its steps. A single rank waits for nobody.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    measured = model._get_ddp_logging_data()
    waits = measured.get("avg_backward_comm_time", 0) - measured.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0, waits) / 1e9


def train_epoch(step: Step, batches: Batches, args: Namespace, title: str) -> Tensor:
    """One pass over this rank's batches; every rank calls it. Returns its [loss, correct, samples], as sums.

    A rank that has a title prints a progress bar under it every args.log_interval batches.
    """
    step.model.train()
    sums = batches.sums = torch.zeros(3, dtype=torch.float64, device=batches.device)
    for number, (images, labels) in enumerate(batches, 1):
        counted = step(images, labels)
        sums += counted
        if title and (number % args.log_interval == 0 or number == len(batches)):
            bar, loss = "#" * (20 * number // len(batches)), counted[0] / counted[2]
            print(f"{title} [{bar:.<20}] {number}/{len(batches)} loss {loss:.4f}", flush=True)
        if args.dry_run:
            break
    batches.exposed = number * exposed(step.model)
    return sums


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> Tensor:
    """[loss, correct, samples] over this rank's test batches; the ranks may hold different numbers of them."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=batches.device)

    def counted(images: Tensor, labels: Tensor) -> Tensor:
        return count(model(images), labels)

    for images, labels in batches:
        sums += in_memory("--test-batch-size", counted, counted, images, labels)
    return sums
