"""Train or test with each batch once, and measure: sums with names, of batches and of ranks."""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.model import loss_and_metrics


def has_bf16(device: torch.device) -> bool:
    """Say whether the device has units for bfloat16; a processor without emulates it, and is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "arm_bf16")))


def set_precision(args: Namespace, device: torch.device) -> None:
    """Set args.precision where no flag has; float32 computes with 24 bits, and not with TF32's 11."""
    args.precision = args.precision or ("bf16" if has_bf16(device) else "float32")
    if args.precision == "float32":
        torch.backends.cudnn.allow_tf32 = False


def count_gpus(no_cuda: bool) -> int:
    """Count the GPUs that torch sees, or none with --no-cuda; stops where it sees none of those that were given."""
    gpus = 0 if no_cuda else torch.cuda.device_count()
    # CUDA_VISIBLE_DEVICES counts before what Slurm says: empty, it hides all. Who trains on CPUs though there are GPUs
    # says --no-cuda; so do the jobs of the course's own Slurm, whose GPU slots are no GPUs.
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
    name = next((name for name in names if name in os.environ), "")
    given = f"{name}={os.environ.get(name, '')}"
    if not (gpus or no_cuda or given.endswith(("=", "=-1", "=NoDevFiles", "ON_NODE=0"))):
        cure = "install a torch for this driver's CUDA (nvidia-smi), give the container --nv, or give --no-cuda"
        stop(f"{given}, but torch {torch.__version__} sees no GPU: {cure}")
    return gpus


def merged(parts: Iterable[dict]) -> dict:
    """Merge what was measured in parts, batches or ranks, by name: added up, but of max_NAME the largest."""
    whole = {}
    for part in parts:
        for name, value in part.items():
            if name.startswith("max_"):
                whole[name] = max(whole.get(name, value), value)
            else:
                whole[name] = whole.get(name, 0) + value  # a new tensor each time: a CUDA graph fills its own anew
    return whole


def one_pass(
    model: nn.Module,
    batches: Iterable,
    args: Namespace,
    optimizer: Optimizer | None = None,
    title: str = "",
    wait: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train if there is an optimizer, else test; returns by name what this process has measured.

    loss, samples and each metric are added up; max_NAME is the largest; mean_data_seconds: waited for data.
    wait is called before the sums are read, which waits for the GPU.
    """
    device, waited, asked = next(model.parameters()).device, 0.0, time.perf_counter()
    measured = {}
    for step, (inputs, target) in enumerate(batches, 1):
        waited += time.perf_counter() - asked
        inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss, metrics = loss_and_metrics(model(inputs), target)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10)  # against a rare huge step
            optimizer.step()
        sums = {"loss": loss.double() * len(target)} | metrics | {"samples": torch.tensor(len(target))}
        measured = merged([measured, {name: value.detach().double() for name, value in sums.items()}])
        if title and step % args.log_interval == 0:
            print(f"{title} [{'#' * (20 * step // len(batches)):.<20}] {step}/{len(batches)} loss {loss:.4f}")
        if args.dry_run:
            break
        asked = time.perf_counter()
    if wait:
        wait()
    measured = {name: float(value) for name, value in measured.items()}  # waits for the GPU
    return measured | {"mean_data_seconds": waited}
