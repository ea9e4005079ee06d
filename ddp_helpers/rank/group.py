"""Claim a device, and join the process group."""

import os
import re
import socket
import time
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_helpers.rank.launchers import OLDER_NCCL, name_of_start, stop
from ddp_helpers.rank.training import count_gpus, merged

MEET = "export MASTER_ADDR and MASTER_PORT, the same for all ranks and for no other job; do all run?"


def claim_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim this rank's GPU, cuda:local_rank, or the CPU where there is none; every rank calls it."""
    gpus = count_gpus(no_cuda)
    if local_rank >= gpus > 1:
        stop(f"local rank {local_rank} finds {gpus} GPUs: start at most {gpus} ranks on a node, or give --no-cuda")
    device = torch.device("cuda", min(local_rank, gpus - 1)) if gpus else torch.device("cpu")  # one seen is cuda:0
    if gpus:
        torch.cuda.set_device(device)
    return device


def check_address(seconds: float) -> None:
    """Stop with one line where nobody knows the name in MASTER_ADDR; PyTorch would tell of it in pages of C++."""
    address, end = os.environ.get("MASTER_ADDR"), time.monotonic() + min(seconds, 30)  # a new name may come late
    while address:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                stop(f"MASTER_ADDR={address} has no address ({error}): export the name or address of rank 0's node")
        time.sleep(0.5)


def backend_class(device: torch.device) -> str:
    """Name the class that moves tensors of this device between ranks, as ProcessGroupGloo or ProcessGroupNCCL."""
    return type(dist.group.WORLD._get_backend(device)).__name__


def reason(error: Exception) -> str:
    """Read an error's whole text as one line, without C++ frames: the reason that NCCL gives is in its last line."""
    return " ".join(re.split(r"\n(?:Exception raised from|frame #)", str(error))[0].split())


def settings(args: Namespace) -> dict[str, str]:
    """Pick of the flags those that all ranks of a job share: workers and the data's folder may differ by node."""
    shared = vars(args).keys() - {"num_workers", "data"}
    return {name.replace("_", "-"): str(vars(args)[name]) for name in shared}


def stop_strangers(ranks: list[dict]) -> None:
    """Stop all ranks where one was given other settings than rank 0, as one of another job; every rank calls it."""
    first = ranks[0]["settings"].items()
    for other in ranks:
        theirs, ours = other["settings"].items() - first, first - other["settings"].items()
        if theirs or ours:
            dist.barrier()  # no rank leaves while another still needs it
            dist.destroy_process_group()
            given, asked = (" ".join(f"--{name} {value}" for name, value in sorted(of)) for of in (theirs, ours))
            line = f"rank {other['rank']} on {other['host']} has {given or 'nothing'}, rank 0 has {asked or 'nothing'}"
            stop(f"{line}: give all the same flags; if it is of another job, export another MASTER_PORT for that one")


def join(launcher: str, rank: int, world_size: int, device: torch.device, timeout: float) -> None:
    """Form the group of all ranks, or stop with one line after timeout seconds; every rank calls it."""
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)  # who never came says nothing
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    os.environ.setdefault(*OLDER_NCCL)
    try:
        if world_size > 1:
            check_address(timeout)
        store = next(dist.rendezvous("env://", **group))[0] if world_size > 1 else dist.HashStore()
        store = dist.PrefixStore(f"{name_of_start(launcher)} {world_size}", store)  # no stranger has these keys
        dist.init_process_group(backend, store=store, device_id=device_id, **group)
    except (RuntimeError, ValueError) as error:  # it says how many came
        why = reason(error)
        cure = MEET
        if "CUDA error" in why:
            cure = "nvidia-smi shows this node's GPUs, and who uses them"
        elif "NCCL" in why:  # who waits, for ncclUniqueId or at all, may wait for a rank
            waits = re.search("ncclUniqueId|timeout|[Tt]imed out", why)
            cure = f"{f'{MEET} Else ' if waits else ''}export NCCL_DEBUG=INFO, which tells more"
        stop(f"rank {rank} of {world_size}: {why}; {cure}")


def gather_ranks(args: Namespace, launcher: str, local_rank: int, device: torch.device) -> dict:
    """Gather where each rank runs, for the record; every rank calls it. Stops where one has other flags than rank 0."""
    mine = {"rank": dist.get_rank(), "local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine | {"settings": settings(args)})
    stop_strangers(ranks)
    if dist.get_rank() == 0:
        share = args.batch_size // len(ranks)
        print(f"a step takes {args.batch_size} samples, {share} on each of {len(ranks)} ranks", flush=True)
    facts = {"launcher": launcher, "job_id": os.environ.get("SLURM_JOB_ID"), "world_size": len(ranks)}
    facts |= {"backend": backend_class(device)}
    ranks = [{name: here[name] for name in mine} for here in ranks]
    return facts | {"global_batch_size": args.batch_size, "ranks": ranks}


def over_ranks(measured: dict[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Merge what each rank measured by name, for all ranks; every rank calls it. mean_NAME is averaged over them."""
    ranks = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, measured, group=group)  # names too: a rank without a sample to test has none
    return {name: value / len(ranks) if name.startswith("mean_") else value for name, value in merged(ranks).items()}
