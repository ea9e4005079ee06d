"""Join the process group, and gather what all ranks have to know of each other.

The scripts call these on every rank, in this order, between the flags and the training.
It needs torch.
"""

import atexit
import os
import re
import socket
import sys
import threading
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_helpers.rank.launchers import OLDER_NCCL, name_of_start, stop
from ddp_helpers.rank.training import merge

_EXPORT_ADDRESS = (
    "export MASTER_ADDR and MASTER_PORT, the same for all ranks and for no other job; do all run?"
)


_REST = 1.0  # seconds for which a fork, and the end, wait for the other threads


def check_address(seconds: float) -> None:
    """Stop with one line where nobody knows the name in MASTER_ADDR; every rank calls it.

    PyTorch would tell of it in pages of C++. A new name may come late: it is asked for so many
    seconds, at most 30.
    """
    address = os.environ.get("MASTER_ADDR")
    end = time.monotonic() + min(seconds, 30)
    while address:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                stop(
                    f"MASTER_ADDR={address} has no address ({error}): "
                    "export the name or address of rank 0's node"
                )
        time.sleep(0.5)


def backend_class(device: torch.device) -> str:
    """Name the class that moves tensors of this device between ranks, such as ProcessGroupNCCL."""
    group = dist.distributed_c10d._get_default_group()
    return type(group._get_backend(device)).__name__


def reason(error: Exception) -> str:
    """Give an error's text as one line without C++ frames; NCCL's reason is in its last line."""
    text = re.split(r"\n(?:Exception raised from|frame #)", str(error))[0]
    return " ".join(text.split())


def wait_before_fork_and_exit() -> None:
    """Have this process wait until no other thread runs, before it forks a worker or ends.

    On Linux, for _REST seconds at most. A thread of gloo takes the GIL to free a tensor. A worker
    forked in that moment hangs before 3.12: https://github.com/python/cpython/issues/112275
    A process that ends in that moment is aborted (SIGABRT) before 3.14, although all is done:
    https://github.com/pytorch/pytorch/issues/38228
    """
    if sys.platform == "linux" and sys.version_info < (3, 12):
        os.register_at_fork(before=_wait_for_threads)
    if sys.platform == "linux" and sys.version_info < (3, 14):
        atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until no other thread of this process runs, for _REST seconds at most."""
    me, end = str(threading.get_native_id()), time.monotonic() + _REST
    tasks = Path("/proc/self/task")
    while any(_is_running(task) for task in tasks.iterdir() if task.name != me):
        if time.monotonic() > end:
            break
        time.sleep(0.001)


def _is_running(task: Path) -> bool:
    """Tell whether a thread, by its folder in /proc, has work to do: state R of proc(5)."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2].startswith("R")
    except OSError:  # it has ended since
        return False


def join(
    launcher: str,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: float,
) -> None:
    """Form the group of all ranks; every rank calls it. Stops after timeout seconds."""
    # Who never came prints nothing.
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)
    wait_before_fork_and_exit()
    limit = timedelta(seconds=timeout)
    on_gpu = device.type == "cuda"
    os.environ.setdefault(*OLDER_NCCL)
    store: dist.Store = dist.HashStore()
    try:
        if world_size > 1:
            check_address(timeout)
            meeting = dist.rendezvous("env://", rank, world_size, timeout=limit)
            store, *_ = next(meeting)
        # No other job has these keys.
        prefix = f"{name_of_start(launcher)} {world_size}"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:  # it says how many came
        text = reason(error)
        stop(f"rank {rank} of {world_size}: {text}; {_cure_of(text)}")


def _cure_of(text: str) -> str:
    """Choose what to do about an error of the group, from its text."""
    if "CUDA error" in text:
        return "nvidia-smi shows this node's GPUs, and who uses them"
    # Gloo's ranks write their addresses into the store, each under its own rank.
    missing = re.search(r"wait timeout .*//cpu//\d+/(\d+)$", text)
    if missing:
        late = f"rank {missing[1]} has not joined: read its own lines in the log of its node"
        return f"{late}; if it runs, it has another MASTER_ADDR or MASTER_PORT, or another job's"
    if "NCCL" not in text:
        return _EXPORT_ADDRESS
    debug = "export NCCL_DEBUG=INFO, which tells more"
    # Who waits, for ncclUniqueId or at all, may wait for a rank.
    waits = re.search("ncclUniqueId|timeout|[Tt]imed out", text)
    return f"{_EXPORT_ADDRESS} Else {debug}" if waits else debug


def gather_ranks(
    args: Namespace,
    launcher: str,
    local_rank: int,
    device: torch.device,
) -> dict[str, object]:
    """Gather where each rank runs, for the record; every rank calls it.

    Stops all ranks where one was given other flags than rank 0.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = {
        "rank": rank,
        "local_rank": local_rank,
        "host": os.uname().nodename,
        "device": str(device),
    }
    settings = _shared_settings(args)
    gathered = [(placement, settings)] * world_size
    dist.all_gather_object(gathered, (placement, settings))
    _stop_strangers(gathered)
    if rank == 0:
        share = args.batch_size // world_size
        step = f"a step takes {args.batch_size} samples"
        print(f"{step}, {share} on each of {world_size} ranks", flush=True)
    return {
        "launcher": launcher,
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "world_size": world_size,
        "backend": backend_class(device),
        "global_batch_size": args.batch_size,
        "ranks": [placement for placement, _ in gathered],
    }


def _shared_settings(args: Namespace) -> dict[str, str]:
    """Pick the flags that all ranks of a job share: two may differ from node to node."""
    shared = vars(args).keys() - {"num_workers", "data"}
    return {name.replace("_", "-"): str(vars(args)[name]) for name in shared}


def _stop_strangers(gathered: list[tuple[dict[str, object], dict[str, str]]]) -> None:
    """Stop all ranks where one has other settings than rank 0, as one of another job has.

    gathered: the placement and the settings of each rank. Every rank calls it.
    """
    _, first = gathered[0]
    for placement, settings in gathered:
        if settings == first:
            continue
        dist.barrier()  # no rank leaves while another still needs it
        dist.destroy_process_group()
        stranger = f"rank {placement['rank']} on {placement['host']}"
        theirs = _as_flags(settings.items() - first.items())
        expected = _as_flags(first.items() - settings.items())
        stop(
            f"{stranger} has {theirs}, rank 0 has {expected}: give all the same flags; "
            "if it is of another job, export another MASTER_PORT for that one"
        )


def _as_flags(settings: set[tuple[str, str]]) -> str:
    """Write settings as flags with their values; "nothing" if there are none."""
    return " ".join(f"--{name} {value}" for name, value in sorted(settings)) or "nothing"


def over_ranks(
    measured: dict[str, float],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Merge what each rank measured by name; every rank calls it, and gets the same.

    The sums are added up, of max_NAME the largest counts, and mean_NAME is averaged over the ranks.
    """
    world_size = dist.get_world_size()
    parts = [measured] * world_size
    # Names, too: a rank without a sample to test has none.
    dist.all_gather_object(parts, measured, group=group)
    totals = merge(parts)
    for name in totals:
        if name.startswith("mean_"):
            totals[name] /= world_size
    return totals
