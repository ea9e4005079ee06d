"""Have a script that asks for CUDA and NCCL run on the CPU under gloo: an audit compares ranks, not speeds."""

import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def on_cpu(value: object) -> object:
    """The CPU in place of a CUDA device, or of its name; anything else as it is."""
    cuda = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return CPU if cuda else value


class OnCPU(TorchFunctionMode):
    """Whatever torch is told to put on a GPU stays on the CPU."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """Call torch's function with the CPU for each GPU among its arguments."""
        if func is torch.device:  # it keeps its name, by which the script may choose
            return func(*args, **(kwargs or {}))
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:  # whose number is a device
            args = tuple(CPU if type(one) is int else one for one in args)
        return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in (kwargs or {}).items()})


def begin() -> None:
    """Put the CPU in CUDA's place from now on; every rank calls it, before its script."""
    join, wrap, load = dist.init_process_group, DDP.__init__, torch.load

    @functools.wraps(join)
    def joined(backend: str | None = None, *things: object, **options: object) -> None:
        join("gloo", *things, **options | {"device_id": None})

    def wrapped(model: DDP, module: torch.nn.Module, *_: object, **options: object) -> None:
        wrap(model, module, **options | {"device_ids": None, "output_device": None})

    def loaded(f: object, *_: object, **options: object) -> object:
        return load(f, **options | {"map_location": CPU})

    dist.init_process_group = distributed_c10d.init_process_group = joined
    DDP.__init__, torch.load, torch.cuda.set_device = wrapped, loaded, lambda *_: None
    torch.cuda.current_device = lambda: int(os.environ["LOCAL_RANK"])
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    OnCPU().__enter__()
