"""A job of many ranks in one process: its real topologies and samplers are made rank after rank.

Nothing is trained and nobody waits: it says what a job of that size is handed, not how fast it is.
"""

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ddp_helpers.rank.topology import Topology


def topologies(nodes: int, per_node: int) -> list[Topology]:
    """Compute each rank's Topology from the variables that srun would set; the learner's process calls it."""
    return [Topology.from_env(env) for env in variables(nodes, per_node)]


def variables(nodes: int, per_node: int) -> Iterator[dict[str, str]]:
    """The variables that srun sets for each task of such a job, as far as a Topology reads them."""
    for node in range(nodes):
        here = range(node * per_node, (node + 1) * per_node)
        for local_rank, rank in enumerate(here):
            env = {"SLURM_JOB_ID": 1, "SLURM_STEP_NUM_TASKS": nodes * per_node, "SLURM_PROCID": rank}
            env |= {"SLURM_LOCALID": local_rank, "SLURM_NODEID": node, "SLURM_GTIDS": ",".join(map(str, here))}
            yield {name: str(value) for name, value in env.items()} | {"MASTER_ADDR": "node0000"}


def sampler(length: int, me: Topology, epoch: int = 1) -> DistributedSampler:
    """The training sampler of a rank, as mnist_ddp makes it, in this epoch."""
    made = DistributedSampler(range(length), me.world_size, me.rank, seed=1)
    made.set_epoch(epoch)
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as in a task with one CPU: threads that wait for work would take the time of others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shards(length: int, job: Sequence[Topology], epoch: int = 1) -> list[list[int]]:
    """The training samples of every rank, by their index. The job's ranks take turns."""
    with one_thread():
        return [list(sampler(length, me, epoch)) for me in job]


def evaluation_shards(length: int, job: Sequence[Topology]) -> list[range]:
    """The test samples of every rank, by their index, as mnist_ddp shares them."""
    return [range(me.rank, length, me.world_size) for me in job]


@dataclass(frozen=True)
class Cover:
    """The coverage of a dataset by shards: none is left out if `missing` is 0, and none repeated if `extra` is 0."""

    missing: int  # samples that no rank has
    extra: int  # times that a rank has a sample which it, or another, has already
    smallest: int  # samples of the rank that has the fewest
    largest: int


def cover(shards: Sequence[Sequence[int]], length: int) -> Cover:
    """Count each of `length` samples in the shards."""
    sizes = [len(shard) for shard in shards]
    seen = np.bincount(np.concatenate([np.asarray(shard, int) for shard in shards]), minlength=length)
    return Cover(int((seen[:length] == 0).sum()), sum(sizes) - int((seen > 0).sum()), min(sizes), max(sizes))


def sampler_cost(length: int, me: Topology, times: int = 3) -> tuple[float, int]:
    """Seconds (the best of `times`) and bytes of memory that one rank's sampler takes for the order of one epoch."""
    made, took = sampler(length, me), []
    with one_thread():
        for _ in range(times):
            begin = time.perf_counter()
            list(made)
            took.append(time.perf_counter() - begin)
    tracemalloc.start()
    list(made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(took), peak + 8 * length  # torch's permutation of 64-bit numbers, which Python does not see
