"""Settle how to train, and train or test with each batch once."""

import os
import time
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ddp_helpers.rank.model import loss_and_right

MADE_FROM = "ddp_helpers, imported"  # a script that was written out says here from which revision


def has_bf16(device: torch.device) -> bool:
    """Say whether the device has units for bfloat16; a processor without emulates it, and is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "arm_bf16")))


def cpus_of_rank() -> int:
    """Count the CPUs that this process has to itself: those of its Slurm task, or its share of torchrun's."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK"))
    sharing, task = (int(value) if value.isdecimal() else 0 for value in given)
    return max(1, min(cpus // max(1, sharing), task or cpus))


def settle(args: Namespace, device: torch.device, train_set: Dataset) -> dict:
    """Settle precision and workers where no flag does. Returns what the record says of data and device."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.cpu.get_capabilities().get("cpu_name")
    args.precision = args.precision or ("bf16" if has_bf16(device) else "float32")
    cpus = cpus_of_rank()
    args.num_workers = cpus - 1 if args.num_workers is None else args.num_workers
    found = {"device": str(device), "chip": chip, "cpus": cpus, "torch": torch.__version__, "made_from": MADE_FROM}
    return found | {"dataset": getattr(train_set, "name", type(train_set).__name__), "train_set": len(train_set)}


def one_pass(
    model: nn.Module, batches: DataLoader, args: Namespace, optimizer: Optimizer | None = None, title: str = ""
) -> Tensor:
    """Train if there is an optimizer, else test; returns the sums [loss, right, samples, seconds without data]."""
    device, asked = next(model.parameters()).device, time.perf_counter()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for step, (inputs, target) in enumerate(batches, 1):
        waited = time.perf_counter() - asked
        inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss, right = loss_and_right(model(inputs), target)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10)
            optimizer.step()
        n, seconds = torch.full_like(sums[0], len(target)), torch.full_like(sums[0], waited)  # no copy from the CPU
        sums += torch.stack([loss.detach() * n, right.double(), n, seconds])  # double: bfloat16 counts to 256
        if title and step % args.log_interval == 0:
            print(f"{title} [{'#' * (20 * step // len(batches)):.<20}] {step}/{len(batches)} loss {loss:.4f}")
        if args.dry_run:
            break
        asked = time.perf_counter()
    sums.tolist()  # waits for the GPU
    return sums


def metrics(trained: Tensor, tested: Tensor, begin: float, middle: float) -> dict[str, float]:
    """Compute an epoch's numbers from the sums of its two passes, and when it began and was trained."""
    (loss, right, n, waited), (test_loss, test_right, test_n, _) = trained.tolist(), tested.tolist()
    line = {"train_loss": loss / n, "train_accuracy": right / n, "train_samples": n}
    line |= {"test_loss": test_loss / test_n, "test_accuracy": test_right / test_n, "test_samples": test_n}
    line |= {"seconds": middle - begin, "images_per_second": n / (middle - begin), "data_seconds": waited}
    return line | {"test_seconds": time.perf_counter() - middle}
