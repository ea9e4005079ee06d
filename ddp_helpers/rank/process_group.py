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
    backend, store = "nccl" if device.type == "cuda" else "gloo", me.meet(seconds)
    dist.init_process_group(backend, None, timedelta(seconds=seconds), me.world_size, me.rank, store)
    try:
        yield store
        dist.barrier()  # nobody leaves while a peer still needs an answer
        time.sleep(0.1)  # gloo's threads must let go of the last tensors before Python ends, or the process aborts
    finally:
        dist.destroy_process_group()
