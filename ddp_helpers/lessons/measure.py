"""Measure a rank's memory, by kind, the bytes that it sends, and the time of a step.

Notebooks 14 and 15 compare methods of training with it: their ranks measure and print, the driver
process makes rows of a table. Needs an initialized process group, of gloo on CPUs or of NCCL on
GPUs.
"""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from ddp_tools.memory import MemoryCounter, held_bytes, nbytes

# With the names that the notebooks and the tests need from ddp_tools.memory.
__all__ = [
    "Batch",
    "Method",
    "Result",
    "SavedTensors",
    "flat_vector",
    "held_bytes",
    "measure_methods",
    "nbytes",
    "print_rows",
    "sent_bytes",
    "table_row",
    "trains_alike",
]

_SENT_OFFSET = 200  # of the 64 bits in a socket's TCP_INFO, since Linux 4.19

Batch = tuple[Tensor, Tensor]
_Make = Callable[[], tuple[nn.Module, Optimizer]]
_TakeStep = Callable[[nn.Module, Optimizer, Tensor, Tensor], object]
Method = tuple[_Make, _TakeStep]  # makes model and optimizer; takes a step

# The measurements of a method, in bytes and ms.
Result = TypedDict(
    "Result",
    {
        "memory": dict[str, int],  # at most, by kind
        "allocated": int | None,  # at most, as CUDA counts; None on a CPU
        "ms": list[float],  # of each step but the first
        "sent": float,  # in a step; NaN if the kernel does not count
        "weights off": float,  # the largest difference of a weight from the first method's
        "gradient off": float,  # of the first gradient, relative to the first method's
        "apart": float,  # the largest difference of a weight between the ranks
    },
)


# ---- counters of a rank


class SavedTensors(saved_tensors_hooks):
    """While active, counts what autograd saves in forward; any rank, around a step or a forward.

    `most` has the peak bytes of "activations" and of "copies" of weights: a saved tensor with the
    shape of a parameter, or its transpose, counts as a copy, so choose a different batch size.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, self._unpack)
        self.model = model
        self.most = {"activations": 0, "copies": 0}
        self._counters = {kind: MemoryCounter() for kind in self.most}
        self._sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self._shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}

    def _pack(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in {p.untyped_storage()._cdata for p in self._unsharded()}:
            is_copy = tensor.dim() > 1 and tensor.shape in self._shapes
            self._remove(memory)
            self._counters["copies" if is_copy else "activations"].add(memory)
        self._look()
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._look()
        self._remove(tensor.untyped_storage())
        return tensor

    def _remove(self, memory: UntypedStorage) -> None:
        for counter in self._counters.values():
            counter.remove(memory._cdata)

    def _unsharded(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if not isinstance(p, DTensor)]

    def _look(self) -> None:
        """Update the peak. FSDP replaces shards with full parameters while a layer computes."""
        now = {kind: counter.now for kind, counter in self._counters.items()}
        if self._sharded:
            now["copies"] += nbytes(self._unsharded())
        self.most = {kind: max(self.most[kind], now[kind]) for kind in now}


def sent_bytes() -> float:
    """Count the bytes that this rank has sent over gloo, on all open TCP connections; any rank.

    The kernel counts. Returns NaN if it does not: on systems other than Linux, or with a backend
    that does not send over TCP.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return float("nan")
    folder = Path("/proc/self/fd")
    counts: list[int] = []
    for file in folder.iterdir() if folder.is_dir() else []:
        with suppress(OSError, struct.error):  # closed meanwhile, or not TCP, or an older kernel
            if str(file.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts += struct.unpack_from("Q", info, _SENT_OFFSET)
    return sum(counts) if counts else float("nan")


def flat_vector(tensors: Iterable[Tensor]) -> Tensor:
    """Copy all numbers of some tensors into a vector, shards gathered; every rank calls it."""
    gathered = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return parameters_to_vector(gathered).detach()


# ---- measuring


@dataclass
class _Run:
    """A method in training on this rank, and the measurements of its steps."""

    model: nn.Module
    optimizer: Optimizer
    take_step: _TakeStep
    memory: dict[str, int]  # of the first step, which is not timed
    allocated: int | None
    gradient: Tensor
    ms: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)


def measure_methods(methods: Mapping[str, Method], batches: list[Batch]) -> dict[str, Result]:
    """Train each method on the same batches, turn by turn, and count.

    Every rank calls it, with the same number of batches, two or more. The first step is not timed:
    its memory and its gradient are kept.
    """
    runs = {name: _start_run(method, batches[0]) for name, method in methods.items()}
    for batch in batches[1:]:
        for run in runs.values():
            _time_step(run, batch)
    weights = {name: flat_vector(run.model.parameters()) for name, run in runs.items()}
    first = next(iter(runs))
    results: dict[str, Result] = {}
    for name, run in runs.items():
        gradient_off = (run.gradient - runs[first].gradient).norm() / runs[first].gradient.norm()
        results[name] = {
            "memory": run.memory,
            "allocated": run.allocated,
            "ms": run.ms,
            "sent": median(run.sent),
            "weights off": (weights[name] - weights[first]).abs().max().item(),
            "gradient off": gradient_off.item(),
            "apart": _spread(weights[name]),
        }
    return results


def _start_run(method: Method, batch: Batch) -> _Run:
    """Make model and optimizer, take one step, and count the memory; every rank calls it."""
    make, take_step = method
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    model, optimizer = make()
    saved = SavedTensors(model)
    with saved:
        take_step(model, optimizer, *batch)
    allocated = torch.cuda.max_memory_allocated() - before if on_gpu else None
    memory = held_bytes(model, optimizer) | saved.most
    gradient = flat_vector(p.grad for p in model.parameters() if p.grad is not None)
    return _Run(model, optimizer, take_step, memory, allocated, gradient)


def _time_step(run: _Run, batch: Batch) -> None:
    """Take one step, and note its milliseconds and bytes sent; every rank calls it."""
    dist.barrier()
    before, begin = sent_bytes(), time.perf_counter()
    run.take_step(run.model, run.optimizer, *batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    run.ms.append(1000 * (time.perf_counter() - begin))
    run.sent.append(sent_bytes() - before)


def _spread(tensor: Tensor) -> float:
    """Compute the largest difference between the ranks' values of a tensor; every rank calls it."""
    extremes = torch.stack([tensor, -tensor])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return extremes.sum(0).max().item()


# ---- results


def trains_alike(result: Result) -> bool:
    """Whether a method trains like the first one: to the bit over gloo, on CPUs; rounded on GPUs.

    On GPUs attention and embedding add gradients up in no fixed order. If a gradient is near zero,
    AdamW turns such rounding into full steps, so the first gradient is compared instead of the
    weights. In bfloat16 it is off by 1e-3.
    """
    if dist.get_backend() == "gloo":
        return result["weights off"] == 0
    return result["gradient off"] < 1e-4


def table_row(results: Mapping[str, Result], method: str) -> dict[str, float]:
    """Make a row of a table: MB by kind, held and sent, and the speed.

    The speed is DDP's time for a step divided by this method's: the median over the steps.
    """
    result = results[method]
    memory = {kind: size / 1e6 for kind, size in result["memory"].items()}
    steps = zip(results["DDP"]["ms"], result["ms"], strict=True)
    return {
        **memory,
        "held": sum(memory.values()),
        "sent": result["sent"] / 1e6,
        "speed": median(of_ddp / ms for of_ddp, ms in steps),
    }


def print_rows(results: Mapping[str, Result]) -> None:
    """Print a line for each method: memory, bytes, speed, and how far its weights are off."""
    for name, result in results.items():
        row = table_row(results, name)
        allocated = result["allocated"]
        cuda = f" ({allocated / 1e6:.1f} at most by CUDA's count)" if allocated else ""
        sends = "" if math.isnan(row["sent"]) else f"sends {row['sent']:5.2f} MB per step, "
        print(f"{name:<14}holds {row['held']:5.1f} MB{cuda}, {sends}", end="")
        print(f"{row['speed']:.2f} of DDP's speed; weights off by {result['weights off']:.0e}")
