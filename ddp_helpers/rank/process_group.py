"""Join the process group, and leave it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_helpers.rank.topology import Topology


@contextmanager
def process_group(me: Topology, device: torch.device, seconds: float) -> Iterator[dist.Store]:
    """Be in the group for the length of the block; every rank must enter. Waits for peers at most `seconds`."""
    cuda, store = device.type == "cuda", me.meet(seconds)
    ranks = {"rank": me.rank, "world_size": me.world_size, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("nccl" if cuda else "gloo", store=store, device_id=device if cuda else None, **ranks)
    try:
        yield store
        dist.barrier()  # nobody leaves while a peer still needs an answer
        time.sleep(0.1)  # gloo's threads must let go of the last tensors before Python ends, or the process aborts
    finally:
        dist.destroy_process_group()
