"""Claim a device, and join the process group."""

import os
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_helpers.rank.launchers import stop


def claim_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim this rank's GPU, cuda:local_rank, or the CPU where there is none; every rank calls it."""
    gpus = 0 if no_cuda else torch.cuda.device_count()
    if local_rank >= gpus > 1:
        stop(f"local rank {local_rank} finds {gpus} GPUs: start at most {gpus} ranks on a node, or give --no-cuda")
    device = torch.device("cuda", min(local_rank, gpus - 1)) if gpus else torch.device("cpu")  # one seen is cuda:0
    if gpus:
        torch.cuda.set_device(device)
    return device


def join(args: Namespace, launcher: str, rank: int, local_rank: int, world_size: int) -> tuple[torch.device, dict]:
    """Claim a device and join the group, or stop after args.timeout seconds; returns the device, and what to record."""
    args.batch_size, left = divmod(args.global_batch_size or args.batch_size * world_size, world_size)
    if left:
        stop(f"--global-batch-size {args.global_batch_size} cannot be shared evenly by {world_size} ranks")
    device = claim_device(local_rank, args.no_cuda)
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)  # who never came says nothing
    # Another job may come to the same address and port: what only this start has stands in front of each key there.
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    names = names if launcher == "slurm" else ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    start = " ".join(os.environ.get(name, "") for name in ("USER", *names))
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=args.timeout)}
    try:
        store = next(dist.rendezvous("env://", **group))[0] if world_size > 1 else dist.HashStore()
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=dist.PrefixStore(start, store), device_id=device_id, **group)
    except (RuntimeError, ValueError) as error:  # it says how many came
        line = f"rank {rank} of {world_size}: {error}".partition("\n")[0]
        stop(f"{line}; export MASTER_ADDR and MASTER_PORT, the same for all ranks; do all run?")
    ranks = [{"rank": rank, "local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}] * world_size
    dist.all_gather_object(ranks, ranks[rank])
    group = {"world_size": world_size, "global_batch_size": args.batch_size * world_size, "ranks": ranks}
    return device, {"launcher": launcher, "job_id": os.environ.get("SLURM_JOB_ID")} | group
