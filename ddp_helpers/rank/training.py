"""Train or test with each batch once."""

import time
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_helpers.rank.model import loss_and_right


def has_bf16(device: torch.device) -> bool:
    """Say whether the device has units for bfloat16; a processor without emulates it, and is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "arm_bf16")))


def one_pass(model: nn.Module, batches: DataLoader, args: Namespace, optimizer=None, title: str = "") -> Tensor:
    """Train if there is an optimizer, else test; returns the sums [loss, right, samples, seconds waited for data]."""
    device, n, waited, asked = next(model.parameters()).device, 0, 0.0, time.perf_counter()
    counted = torch.zeros(2, dtype=torch.float64, device=device)
    for step, (inputs, target) in enumerate(batches, 1):
        waited += time.perf_counter() - asked
        inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss, right = loss_and_right(model(inputs), target)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10)  # against a rare huge step
            optimizer.step()
        n += len(target)
        counted += torch.stack([loss.detach().double() * len(target), right.double()])
        if title and step % args.log_interval == 0:
            print(f"{title} [{'#' * (20 * step // len(batches)):.<20}] {step}/{len(batches)} loss {loss:.4f}")
        if args.dry_run:
            break
        asked = time.perf_counter()
    return torch.tensor([*counted.tolist(), n, waited], dtype=torch.float64, device=device)  # tolist waits for the GPU
