"""Measure the memory in use on this rank's device: with a context, with a group, after two steps; prints JSON."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parents[2] / "ddp_helpers" / "rank" / "scripts"))
import mnist_ddp


def used():
    """The bytes in use on this GPU, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    _, rank, local_rank, size = mnist_ddp.who_am_i()
    device = mnist_ddp.pick_device(local_rank)
    taken = {"context": used()}
    mnist_ddp.form_group(rank, size, device, 60)
    dist.all_reduce(torch.ones(1, device=device))
    taken["group"] = used()
    model = DDP(mnist_ddp.Net().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.rand(64, 1, 28, 28, device=device)).sum().backward()
        optimizer.step()
    taken["steps"] = used()
    dist.barrier()
    held = torch.cuda.memory_reserved()
    sharing = int(os.environ["LOCAL_WORLD_SIZE"]) if torch.cuda.device_count() == 1 else 1
    if rank == 0:
        print(json.dumps({"taken": taken, "held": held, "beside": taken["steps"] / sharing - held}))
    dist.destroy_process_group()
