"""Have a script that was made for srun, mp.spawn or GPUs run on the ranks of an audit, on the CPU under gloo."""

import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

CPU = torch.device("cpu")
SRUN = {  # what srun tells a task, and where torchrun has it
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_GPUS_ON_NODE": "LOCAL_WORLD_SIZE",
    "GPUS_PER_NODE": "LOCAL_WORLD_SIZE",
}
NOTHING = ("set_device", "set_device_index", "synchronize", "empty_cache", "reset_peak_memory_stats")  # to be done
ONE_NODE = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "1"}


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


def spawned(function: Callable, args: tuple = (), nprocs: int = 1, *_: object, **__: object) -> None:
    """Be one of the ranks that mp.spawn would start; every rank calls it."""
    if nprocs != int(os.environ["WORLD_SIZE"]):
        sys.exit(f"mp.spawn is asked for {nprocs} ranks, and the audit has {os.environ['WORLD_SIZE']}")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 serves at the port that the script chooses
    function(int(os.environ["RANK"]), *args)


def as_launched() -> None:
    """Tell this rank what srun would, and be the rank that mp.spawn would start; every rank calls it."""
    os.environ.update({name: os.environ[told] for name, told in SRUN.items()} | ONE_NODE)
    multiprocessing.spawn = spawned


def without_gpus() -> None:
    """Put the CPU in CUDA's place from now on; every rank calls it, before its script."""
    join, wrap, load, load_from = dist.init_process_group, DDP.__init__, torch.load, DataLoader.__init__

    @functools.wraps(join)
    def joined(backend: str | None = None, *things: object, **options: object) -> None:
        join("gloo", *things, **options | {"device_id": None})

    def wrapped(model: DDP, module: torch.nn.Module, *_: object, **options: object) -> None:
        wrap(model, module, **options | {"device_ids": None, "output_device": None})

    def loaded(f: object, *_: object, **options: object) -> object:
        return load(f, **options | {"map_location": CPU})

    def loading(loader: DataLoader, *things: object, **options: object) -> None:
        load_from(loader, *things, **options | {"pin_memory": False})

    dist.init_process_group = distributed_c10d.init_process_group = joined
    DDP.__init__, torch.load, DataLoader.__init__ = wrapped, loaded, loading
    for module in (torch.cuda, torch.accelerator):
        module.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
        for name in NOTHING:
            setattr(module, name, lambda *_, **__: None)
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: int(os.environ["LOCAL_RANK"])
    torch.cuda.memory_stats = lambda *_, **__: defaultdict(int)
    torch.cuda.get_device_properties = lambda *_, **__: SimpleNamespace(name="CPU", total_memory=0)
    torch.accelerator.is_available, torch.accelerator.current_accelerator = (
        lambda: True,
        lambda *_: torch.device("cuda"),
    )
    OnCPU().__enter__()
