"""Claim a device, join the process group, and learn where its ranks are."""

import os
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_helpers.rank.launchers import stop

# What only the ranks of one start have in common, next to the user: two jobs may come to one address and port.
ONE_START = {
    "slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
}


def own_keys(store: dist.Store, launcher: str) -> dist.Store:
    """Put the name of this start in front of each key of a store, so that strangers there find nothing; any rank."""
    names = ("USER", *ONE_START.get(launcher, ()))
    return dist.PrefixStore(" ".join(os.environ.get(name, "") for name in names), store)


def claim_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim this rank's GPU, cuda:local_rank, or the CPU where there is none; every rank calls it."""
    gpus = 0 if no_cuda else torch.cuda.device_count()
    if local_rank >= gpus > 1:
        stop(f"local rank {local_rank} finds {gpus} GPUs: start at most {gpus} ranks on a node, or give --no-cuda")
    device = torch.device("cuda", min(local_rank, gpus - 1)) if gpus else torch.device("cpu")  # shown one: cuda:0
    if gpus:
        torch.cuda.set_device(device)
    return device


def join(args: Namespace, launcher: str, rank: int, local_rank: int, world_size: int) -> tuple[torch.device, dict]:
    """Claim a device and join the group; every rank calls it. Stops if not all have come in args.timeout seconds.

    Returns the device, and what the record says of the group. args.batch_size is one rank's from then on.
    """
    args.batch_size, left = divmod(args.global_batch_size or args.batch_size * world_size, world_size)
    if left:
        stop(f"--global-batch-size {args.global_batch_size} cannot be shared evenly by {world_size} ranks")
    device = claim_device(local_rank, args.no_cuda)
    mine = {"rank": rank, "local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}
    # Said before the wait: the rank whose line is missing in the log never came.
    print("rank {rank} of {0} on {host}, {device}".format(world_size, **mine), flush=True)
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=args.timeout)}
    group |= {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    place = f"MASTER_ADDR={address} MASTER_PORT={port}"
    if world_size > 1 and not (address and port.isascii() and port.isdecimal() and 0 < int(port[:9]) < 2**16):
        stop(f"{place}: no meeting point: export both, the same for all ranks, before srun or mpirun")
    try:
        store = dist.HashStore()
        if world_size > 1:  # all meet at this address: rank 0 listens there, or torchrun does
            listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            store = own_keys(dist.TCPStore(address, int(port), world_size, listens, group["timeout"]), launcher)
        dist.init_process_group(store=store, **group)
    except (RuntimeError, ValueError) as error:  # it says how many came
        why = str(error).partition("\n")[0]
        stop(f"rank {rank} of {world_size} at {place}: {why}; is it the same for all ranks, and do all run?")
    ranks = [mine] * world_size
    dist.all_gather_object(ranks, mine)
    group = {"world_size": world_size, "global_batch_size": args.batch_size * world_size, "ranks": ranks}
    return device, {"launcher": launcher, "job_id": os.environ.get("SLURM_JOB_ID")} | group
