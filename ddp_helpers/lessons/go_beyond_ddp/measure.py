"""What a rank holds in memory, by kind, what it sends, and how long it takes: counted for several ways of training."""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from ddp_helpers.tools.memory import SavedTensors, held_bytes, nbytes

# With what the notebook needs of tools.memory.
__all__ = ["SavedTensors", "alike", "apart", "flat_vector", "held_bytes", "nbytes", "race", "row", "sent", "tell"]

BYTES_SENT = 200  # where Linux keeps it in a socket's TCP_INFO: 64 bits, since Linux 4.19

Batch = tuple[Tensor, Tensor]
Way = tuple[Callable[[], tuple[nn.Module, Optimizer]], Callable[[nn.Module, Optimizer, Tensor, Tensor], Tensor]]


def sent() -> float:
    """Bytes that this rank has sent over gloo, says the kernel: all its open TCP connections; any rank.

    NaN where it does not tell: not Linux, or another backend, which takes other roads.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return float("nan")
    counts, folder = [], Path("/proc/self/fd")
    for file in folder.iterdir() if folder.is_dir() else []:
        with suppress(OSError, struct.error):  # closed meanwhile, or not TCP, or an older kernel
            if str(file.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts += struct.unpack_from("Q", info, BYTES_SENT)
    return sum(counts) if counts else float("nan")


def flat_vector(tensors: Iterable[Tensor]) -> Tensor:
    """All of them as one vector, shards put together; every rank must call it."""
    return parameters_to_vector([t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]).detach()


def apart(tensor: Tensor) -> float:
    """Compute the largest difference between the ranks' values of a tensor; every rank must call it."""
    ends = torch.stack([tensor, -tensor])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return ends.sum(0).max().item()


def race(ways: dict[str, Way], batches: list[Batch]) -> dict[str, dict]:
    """Train each way on the same batches, turn by turn, and count; every rank must call it, with as many batches.

    A way: a function that makes model and optimizer, and one that takes a step and gives the loss. The first step is
    not timed: its memory and its gradient are kept. Bytes, milliseconds; `sent` is NaN where the kernel does not tell.
    weights off: the largest difference of a weight from the first way's; apart: between the ranks.
    """
    results, made = {}, {}
    for name, (make, step) in ways.items():
        results[name], made[name] = counted_step(make, step, batches[0])
    for batch in batches[1:]:
        for name, (_, step) in ways.items():
            timed_step(results[name], step, *made[name], batch)
    first, *_ = weights = [flat_vector(model.parameters()) for model, _ in made.values()]
    gradient = results[next(iter(ways))]["gradient"]
    for result, mine in zip(results.values(), weights, strict=True):
        result |= {"weights off": (mine - first).abs().max().item(), "apart": apart(mine)}
        result["gradient off"] = ((result.pop("gradient") - gradient).norm() / gradient.norm()).item()
        result["sent"] = median(result["sent"])
    return results


def alike(result: dict) -> bool:
    """Say whether a way of `race` trains as the first one: to the bit over gloo, on CPUs; up to rounding on GPUs.

    There attention and embedding add gradients up in no fixed order. AdamW makes whole steps of such rounding, where a
    gradient is near zero, so the first gradient is compared, and not the weights. In bfloat16 it is off by 1e-3.
    """
    return result["weights off"] == 0 if dist.get_backend() == "gloo" else result["gradient off"] < 1e-4


def counted_step(make: Callable, step: Callable, batch: Batch) -> tuple[dict, tuple[nn.Module, Optimizer]]:
    """Make a model and an optimizer, take one step, and count the memory; every rank must call it."""
    if gpu := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    model, optimizer = make()
    saved = SavedTensors(model)
    with saved:
        loss = step(model, optimizer, *batch).item()
    result = {"allocated": torch.cuda.max_memory_allocated() - before if gpu else None, "loss": [loss]}
    result |= {"memory": held_bytes(model, optimizer) | saved.most, "gradient": flat_vector(p.grad for p in model.parameters())}
    return result | {"ms": [], "sent": []}, (model, optimizer)


def timed_step(result: dict, step: Callable, model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    """One step; adds its loss, milliseconds and bytes sent to the result; every rank must call it."""
    dist.barrier()
    before, begin = sent(), time.perf_counter()
    result["loss"].append(step(model, optimizer, *batch).item())  # .item() waits for the GPU
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    result["ms"].append(1000 * (time.perf_counter() - begin))
    result["sent"].append(sent() - before)


def row(results: dict[str, dict], way: str) -> dict[str, float | str]:
    """A row of a table: MB by kind, held and sent, speed in DDP's with its quartiles, how near to DDP it trains."""
    result = results[way]
    ratios = [base / other for base, other in zip(results["DDP"]["ms"], result["ms"], strict=True)]
    found = {kind: size / 1e6 for kind, size in result["memory"].items()}
    found |= {"held_bytes": sum(found.values()), "sent": result["sent"] / 1e6}
    found |= dict(zip(("low", "speed", "high"), quantiles(ratios, n=4), strict=True))
    what = "gradient off" if result["gradient off"] else "weights off"  # or equal in the first step
    return found | {"as DDP": f"{what} by {result[what]:.0e}" if result["weights off"] else "to the bit"}


def tell(results: dict[str, dict]) -> None:
    """Print a line for each way: memory, bytes, speed, and how far its weights are from the first way's."""
    for name, result in results.items():
        found = row(results, name)
        cuda = f" ({result['allocated'] / 1e6:.1f} at most, says CUDA)" if result["allocated"] else ""
        print(f"{name:<14}holds {found['held']:5.1f} MB{cuda}, sends {found['sent']:5.2f} MB a step,", end=" ")
        print(f"{found['speed']:.2f} of DDP's speed; weights off by {result['weights off']:.0e}")
