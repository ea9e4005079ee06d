"""Run a script for srun, mp.spawn or GPUs on the ranks of an audit, on CPUs with gloo.

instrument.py calls `as_launched` and `without_gpus` on every rank, before the script. Needs torch.
"""

import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ddp_tools.audit.notes import NO_SUCH_DEVICE
from ddp_tools.audit.watch import replace_call

CPU = torch.device("cpu")
_SRUN = {  # srun's variables, and torchrun's with the same value
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS": "WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_GPUS_ON_NODE": "LOCAL_WORLD_SIZE",
    "GPUS_PER_NODE": "LOCAL_WORLD_SIZE",
}


class Moment:
    """A CUDA event or stream whose work is complete at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.time = time.perf_counter()

    def record(self, *_: object) -> None:
        """Record the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, other: "Moment") -> float:
        """The milliseconds between two events."""
        return 1000 * (other.time - self.time)

    def query(self) -> bool:
        """All work is complete."""
        return True

    def synchronize(self, *_: object) -> None:
        """Return at once: no work is pending."""

    wait = wait_event = wait_stream = synchronize


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def _local_world_size() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


# The return values of functions of torch.cuda and torch.accelerator for the script.
_ANSWERS: dict[str, Callable[[], object]] = {
    "is_available": lambda: True,
    "device_count": _local_world_size,
    "current_device": _local_rank,
    "current_device_index": _local_rank,
    "current_accelerator": lambda: torch.device("cuda"),
    "get_device_name": lambda: "CPU",
    "get_device_properties": lambda: SimpleNamespace(name="CPU", total_memory=0),
    "memory_stats": lambda: defaultdict(int),
    "synchronize": lambda: None,
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda: None,
    "stream": nullcontext,
    "current_stream": Moment,
    "default_stream": Moment,
    "get_rng_state": torch.get_rng_state,
    "get_rng_state_all": lambda: [torch.get_rng_state()],
}


def _for_script(answer: Callable[[], object], truth: Callable) -> Callable:
    """Wrap a function so that the script gets this answer; torch itself gets the real one."""

    def answered(*args: Any, **options: Any) -> object:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        by_torch = caller.partition(".")[0] == "torch"
        return truth(*args, **options) if by_torch else answer()

    return answered


def _on_cpu(value: object) -> object:
    """Replace a CUDA device, or its name, with the CPU; return anything else unchanged."""
    if not isinstance(value, str | torch.device):
        return value  # before str(): a storage's would print each number
    name, _, number = str(value).partition(":")
    if name != "cuda":
        return value
    return _number_on_cpu(int(number)) if number.isdecimal() else CPU


def _number_on_cpu(value: object) -> object:
    """Replace the number of a device with the CPU; return anything else unchanged.

    Raises RuntimeError, as CUDA does, for a device that a simulated node of one rank lacks.
    """
    if type(value) is not int:
        return value
    if os.environ.get("DDP_AUDIT_TWO_NODES") and value >= _local_world_size():
        raise RuntimeError(f"{NO_SUCH_DEVICE}: {value}, on a node with device 0 only")
    return CPU


def _set_device(device: object = None) -> nullcontext:
    """Choose a device, which has no effect; also usable in a `with` statement."""
    _number_on_cpu(_on_cpu(device))
    return nullcontext()


class _OnCPU(TorchFunctionMode):
    """Keeps on the CPU everything that torch's functions would put on a GPU."""

    def __torch_function__(
        self,
        func: Callable,
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        """Call torch's function, with each GPU among its arguments replaced with the CPU."""
        options = kwargs or {}
        if func is torch.device:  # it keeps its name, which the script may test
            return func(*args, **options)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            for device in [*args[1:], *options.values()]:
                _set_device(device)
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(map(_number_on_cpu, args))
        options = {name: _on_cpu(value) for name, value in options.items()}
        if "device" in options:
            options["device"] = _number_on_cpu(options["device"])
        return func(*map(_on_cpu, args), **options)


def _unchanged(module: torch.nn.Module, *_: object, **__: object) -> torch.nn.Module:
    """Return a model unchanged."""
    return module


def _spawned(
    function: Callable,
    args: tuple = (),
    nprocs: int = 1,
    *_: object,
    **__: object,
) -> None:
    """Act as one of the ranks that mp.spawn would start; every rank calls it."""
    world_size = os.environ["WORLD_SIZE"]
    if nprocs != _local_world_size():
        sys.exit(f"mp.spawn is asked for {nprocs} ranks, and the audit has {world_size}")
    function(_local_rank(), *args)


def on_two_nodes() -> None:
    """Make each rank the only one of its node; every rank calls it."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    os.environ["GROUP_WORLD_SIZE"] = os.environ["WORLD_SIZE"]


def as_launched() -> None:
    """Set srun's variables and make mp.spawn run its function in this rank; every rank calls it."""
    told_by_srun = {name: os.environ[source] for name, source in _SRUN.items()}
    world_size, on_node = int(os.environ["WORLD_SIZE"]), _local_world_size()
    nodes = {
        "SLURM_NNODES": str(world_size // on_node),
        "SLURM_NODEID": str(int(os.environ["RANK"]) // on_node),
        "SLURM_CPUS_PER_TASK": "1",
    }
    os.environ.update(told_by_srun | nodes)
    replace_call(multiprocessing, "spawn", lambda spawn: _spawned)


def without_gpus() -> None:
    """Replace CUDA with the CPU from now on; every rank calls it, before its script."""
    _use_gloo()
    _use_cpu_in_ddp_and_loaders()
    for module in (torch.cuda, torch.accelerator):
        for name, answer in _ANSWERS.items():
            if hasattr(module, name):
                replace_call(module, name, functools.partial(_for_script, answer))
        for name in {"set_device", "set_device_index", "device"} & {*vars(module)}:
            replace_call(module, name, lambda _: _set_device)
    # SyncBatchNorm takes CUDA tensors only; BatchNorm stays, which the row `device` reports.
    replace_call(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", lambda convert: _unchanged)
    replace_call(torch.cuda, "Event", lambda event: Moment)
    replace_call(torch.cuda, "Stream", lambda stream: Moment)
    _use_cpu_random_numbers()

    def on_cpu_by_default(set_default: Callable) -> Callable:
        return lambda device: set_default(_number_on_cpu(_on_cpu(device)))

    replace_call(torch, "set_default_device", on_cpu_by_default)
    _OnCPU().__enter__()


def _use_gloo() -> None:
    """Make each process group use gloo instead of the script's backend."""
    join = dist.init_process_group

    @functools.wraps(join)
    def joined(backend: str | None = None, *args: Any, **options: Any) -> None:
        join("gloo", *args, **options | {"device_id": None})

    replace_call(dist, "init_process_group", lambda init: joined)
    replace_call(distributed_c10d, "init_process_group", lambda init: joined)


def _use_cpu_in_ddp_and_loaders() -> None:
    """Make DDP, torch.load and loaders keep everything on the CPU."""

    def on_cpu_wrap(wrap: Callable) -> Callable:
        def wrapped(model: DDP, module: torch.nn.Module, *_: Any, **options: Any) -> None:
            for device in options.get("device_ids") or ():
                _set_device(device)
            wrap(model, module, **options | {"device_ids": None, "output_device": None})

        return wrapped

    def on_cpu_load(load: Callable) -> Callable:
        def loaded(f: object, *_: Any, **options: Any) -> object:
            return load(f, **options | {"map_location": CPU})

        return loaded

    def unpinned(load_from: Callable) -> Callable:
        def loading(loader: DataLoader, *args: Any, **options: Any) -> None:
            load_from(loader, *args, **options | {"pin_memory": False})

        return loading

    replace_call(DDP, "__init__", on_cpu_wrap)
    replace_call(torch, "load", on_cpu_load)
    replace_call(DataLoader, "__init__", unpinned)


def _use_cpu_random_numbers() -> None:
    """Make torch.cuda set the state of the CPU's generator."""

    def set_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(new_state)

    def set_states(new_states: list[torch.Tensor]) -> None:
        torch.set_rng_state(new_states[0])

    replace_call(torch.cuda, "set_rng_state", lambda setter: set_state)
    replace_call(torch.cuda, "set_rng_state_all", lambda setter: set_states)
