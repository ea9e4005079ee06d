"""Call a learner's function on real ranks, forked from the learner's process, and judge what they did."""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.notebook.ranks import LOOPBACK

START = 90.0  # seconds that ranks have to form their group, also on a busy machine
PATIENCE = 10.0  # seconds that they have from then on for a case, which needs milliseconds


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on real ranks: `trial` says for an answer and a case what they did."""

    trial: Callable

    def verdict(self, answer: Callable) -> str:
        """One line about a learner's function: right, not attempted, or what its ranks do and why that is not it."""
        oracle, tried = partial(self.trial, self.oracle), partial(self.trial, answer)
        oracle.__name__ = self.oracle.__name__
        traps = {told: partial(self.trial, trap) for told, trap in self.traps.items()}
        return Exercise(oracle, self.cases, traps).verdict(tried)


def on_ranks(size: int, work: Callable[[], Any], patience: float = PATIENCE) -> list:
    """Call a function on so many ranks of one group, and give what it gives on each.

    Raises the first error of a rank, and TimeoutError where ranks wait for each other: after `patience` seconds, which
    begin when all are in the group.
    """
    context, limit = multiprocessing.get_context("fork"), time.monotonic() + START
    met = context.Value("d", 0.0)  # when all were in the group, by the clock that processes share
    with TemporaryDirectory() as folder:
        given, where = context.SimpleQueue(), f"file://{folder}/meeting"
        args = int(size), where, work, given, met
        ranks = [context.Process(target=one_rank, args=(rank, *args)) for rank in range(size)]
        for process in ranks:
            process.start()
        while (alive := [process.sentinel for process in ranks if process.is_alive()]) and time.monotonic() < limit:
            wait(alive, timeout=0.1)
            limit = met.value + patience if met.value else limit
        hung = [str(rank) for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        found = [given.get() for _ in range(size) if not given.empty()]
    for _, error in found:
        if isinstance(error, Exception):
            raise error
    if hung:
        raise TimeoutError(f"rank {' and '.join(hung)} waited for {patience:g} s: do all ranks call the collective?")
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def one_rank(rank: int, size: int, where: str, work: Callable[[], Any], given: SimpleQueue, met: Synchronized) -> None:
    """Join the group, and put what the function gives, or its error, into the queue; each forked process calls it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        dist.barrier()  # or who is done early leaves while others still connect
        met.value = time.monotonic()
        given.put((rank, numbers(work())))
    except Exception as error:
        given.put((rank, error))


def numbers(value: Any) -> Any:
    """Turn tensors into lists: a queue would send a tensor as a file, which is gone with its process."""
    if isinstance(value, list | tuple):
        return [numbers(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def summed(value: float) -> float:
    """Compute the sum of a number over the ranks; every rank calls it."""
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


def each_its_own(answer: Callable, *case: tuple) -> list:
    """Call an answer on as many ranks as a case has members, each with its own: a trial for OnRanks."""
    return on_ranks(len(case), lambda: answer(*case[dist.get_rank()]))
