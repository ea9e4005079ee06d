"""Have a script that was made for srun, mp.spawn or GPUs run on the ranks of an audit, on the CPU under gloo."""

import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
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
    "SLURM_STEP_NUM_TASKS": "WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_GPUS_ON_NODE": "LOCAL_WORLD_SIZE",
    "GPUS_PER_NODE": "LOCAL_WORLD_SIZE",
}
ONE_NODE = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "1"}


class Moment:
    """An event, or a stream, of a GPU whose work is done as soon as it is asked for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.time = time.perf_counter()

    def record(self, *_: object) -> None:
        """Note the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, other: "Moment") -> float:
        """The milliseconds between two events."""
        return 1000 * (other.time - self.time)

    def query(self) -> bool:
        """All is done."""
        return True

    def synchronize(self, *_: object) -> None:
        """There is nothing to wait for."""

    wait = wait_event = wait_stream = synchronize


ANSWERS = {  # of torch.cuda and torch.accelerator, to the script
    "is_available": lambda: True,
    "device_count": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
    "current_device": lambda: int(os.environ["LOCAL_RANK"]),
    "current_device_index": lambda: int(os.environ["LOCAL_RANK"]),
    "current_accelerator": lambda: torch.device("cuda"),
    "get_device_name": lambda: "CPU",
    "get_device_properties": lambda: SimpleNamespace(name="CPU", total_memory=0),
    "memory_stats": lambda: defaultdict(int),
    **dict.fromkeys(("set_device", "set_device_index", "synchronize", "empty_cache"), lambda: None),
    "reset_peak_memory_stats": lambda: None,
    **dict.fromkeys(("device", "stream"), nullcontext),
    **dict.fromkeys(("current_stream", "default_stream"), Moment),
    "get_rng_state": torch.get_rng_state,
    "get_rng_state_all": lambda: [torch.get_rng_state()],
}


def for_script(answer: Callable, truth: Callable) -> Callable:
    """A function that gives the script this answer, and torch, which would act on it, the truth."""

    def answered(*things: object, **options: object) -> object:
        inside = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return truth(*things, **options) if inside else answer()

    return answered


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
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        named |= {"device": CPU} if type(named.get("device")) is int else {}
        return func(*map(on_cpu, args), **named)


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
    default = torch.set_default_device

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
        for name, answer in ANSWERS.items():
            if hasattr(module, name):
                setattr(module, name, for_script(answer, getattr(module, name)))
    torch.cuda.Event = torch.cuda.Stream = Moment
    torch.cuda.set_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)
    torch.cuda.set_rng_state_all = lambda new_states: torch.set_rng_state(new_states[0])
    torch.set_default_device = lambda device: default(CPU if type(device) is int else on_cpu(device))
    OnCPU().__enter__()
