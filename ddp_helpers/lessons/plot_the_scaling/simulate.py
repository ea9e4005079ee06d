"""A job of many ranks in one process: its real places and samplers are made rank after rank.

Nothing is trained and nobody waits: it says what a job of that size is handed, not how fast it is.
"""

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ddp_helpers.rank.launchers import who_am_i


class Place(NamedTuple):
    """A rank's place in its job."""

    rank: int
    local_rank: int
    world_size: int


def places(nodes: int, per_node: int) -> list[Place]:
    """Read each rank's place from the variables that srun would set; the learner's process calls it."""
    return [Place(*who_am_i(env)[1:]) for env in variables(nodes, per_node)]


def variables(nodes: int, per_node: int) -> Iterator[dict[str, str]]:
    """The variables that srun sets for each task of such a job, as far as a script reads them."""
    for rank in range(nodes * per_node):
        env = {"SLURM_STEP_NUM_TASKS": nodes * per_node, "SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node}
        yield {name: str(value) for name, value in env.items()}


def sampler(length: int, me: Place, epoch: int = 1) -> DistributedSampler:
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


def shards(length: int, job: Sequence[Place], epoch: int = 1) -> list[list[int]]:
    """The training samples of every rank, by their index. The job's ranks take turns."""
    with one_thread():
        return [list(sampler(length, me, epoch)) for me in job]


def evaluation_shards(length: int, job: Sequence[Place]) -> list[range]:
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


def sampler_cost(length: int, me: Place, times: int = 3) -> tuple[float, int]:
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
