"""Claim a device, join the process group, and learn where its ranks are."""

import os
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_helpers.rank.launchers import stop

GROUP_FLAGS = {
    "global_batch_size": {"type": int, "help": "samples in a step of all ranks, instead of --batch-size for each"},
    "timeout": {"type": int, "default": 600, "help": "seconds that a rank waits for another"},
}


def join(args: Namespace, launcher: str, rank: int, local_rank: int, world_size: int) -> tuple[torch.device, dict]:
    """Claim a device and join the group; every rank calls it. Stops if not all have come in args.timeout seconds.

    Returns the device, and what the record says of the group. args.batch_size is one rank's from then on.
    """
    args.batch_size, left = divmod(args.global_batch_size or args.batch_size * world_size, world_size)
    if left:
        stop(f"--global-batch-size {args.global_batch_size} cannot be shared evenly by {world_size} ranks")
    gpus = 0 if args.no_cuda else torch.cuda.device_count()
    if local_rank >= gpus > 1:
        stop(f"local rank {local_rank} finds {gpus} GPUs: start at most {gpus} ranks on a node, or give --no-cuda")
    device = torch.device("cuda", min(local_rank, gpus - 1)) if gpus else torch.device("cpu")  # one visible: cuda:0
    if gpus:
        torch.cuda.set_device(device)
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=args.timeout)}
    group |= {"backend": "nccl" if gpus else "gloo", "device_id": device if gpus else None}
    store = dist.HashStore() if world_size == 1 else None  # None: all meet at MASTER_ADDR and MASTER_PORT
    try:
        if restart := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):  # torchrun keeps what the dead ranks stored
            tcp = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            store = dist.PrefixStore(f"restart {restart}", tcp)
        dist.init_process_group(store=store, **group)
    except (RuntimeError, ValueError) as error:  # it says how many came
        why = str(error).partition("\n")[0]
        stop(f"rank {rank} of {world_size}: {why}; export MASTER_ADDR and MASTER_PORT, the same for all ranks")
    mine = {"rank": rank, "local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}
    print("rank {rank} of {0} on {host}, {device}".format(world_size, **mine), flush=True)
    ranks = [mine] * world_size
    dist.all_gather_object(ranks, mine)
    job = os.environ.get("SLURM_JOB_ID")
    return device, {"launcher": launcher, "job_id": job, "world_size": world_size, "ranks": ranks}
