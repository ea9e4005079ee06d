"""Train or test with each batch once, and measure: sums with names, of batches and of ranks.

The scripts call `set_precision` before the training, and `one_pass` twice in each epoch, on every
rank. It needs torch.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_helpers.rank.model import loss_and_metrics


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device has units for bfloat16.

    A processor without them emulates it, and is slower than with float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return any(units.get(name) for name in ("amx_bf16", "avx512_bf16", "arm_bf16"))


def set_precision(args: Namespace, device: torch.device) -> None:
    """Set args.precision where no flag has; every rank calls it.

    float32 computes with 24 bits then, and not with TF32's 11.
    """
    if not args.precision:
        args.precision = "bf16" if has_bf16(device) else "float32"
    if args.precision == "float32":
        torch.backends.cudnn.allow_tf32 = False


Number = TypeVar("Number", float, Tensor)


def merge(parts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    """Merge what was measured in parts, batches or ranks, by name.

    The parts are added up; but of max_NAME the largest counts.
    """
    totals: dict[str, Number] = {}
    for part in parts:
        for name, value in part.items():
            if name.startswith("max_"):
                totals[name] = max(totals.get(name, value), value)
            else:  # a new tensor, also of the first: a CUDA graph fills its own anew
                totals[name] = totals.get(name, 0) + value
    return totals


def one_pass(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    args: Namespace,
    optimizer: Optimizer | None = None,
    title: str = "",
    wait: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train if there is an optimizer, else test; every rank calls it.

    title: begins the lines of progress; without it there are none.
    wait: is called before the sums are read, which waits for the GPU.

    Returns by name what this process has measured: loss, samples and each metric are added up;
    max_NAME is the largest; mean_data_seconds is how long it waited for data.
    """
    device = next(model.parameters()).device
    measured: dict[str, Tensor] = {}
    data_seconds, wait_begin = 0.0, time.perf_counter()
    for step, (inputs, target) in enumerate(batches, 1):
        data_seconds += time.perf_counter() - wait_begin
        inputs = inputs.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss, metrics = loss_and_metrics(model(inputs), target)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10)  # against a rare huge step
            optimizer.step()
        sums = {"loss": loss.double() * len(target), **metrics}
        sums["samples"] = torch.tensor(len(target))
        sums = {name: value.detach().double() for name, value in sums.items()}
        measured = merge([measured, sums])
        if title and step % args.log_interval == 0 and isinstance(batches, Sized):
            _print_progress(title, step, len(batches), loss)
        if args.dry_run:
            break
        wait_begin = time.perf_counter()
    if wait:
        wait()
    totals = {name: float(value) for name, value in measured.items()}  # waits for the GPU
    return {**totals, "mean_data_seconds": data_seconds}


def _print_progress(title: str, step: int, steps: int, loss: Tensor) -> None:
    """Print how many of an epoch's steps are done, with a bar, and the last loss."""
    bar = "#" * (20 * step // steps)
    print(f"{title} [{bar:.<20}] {step}/{steps} loss {loss:.4f}")
