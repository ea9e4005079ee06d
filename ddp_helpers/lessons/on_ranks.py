"""Call a learner's function on real ranks, forked from the learner's process, and judge what they did."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Process
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from ddp_helpers.launch.launchers import HERE
from ddp_helpers.launch.processes import MARK, end_all, ended, no_interrupt
from ddp_helpers.lessons.exercise import Exercise

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
    """Call a function on so many ranks of one group, and return what it returns on each.

    Raises ChildProcessError where a rank ended without an answer, or the first error of a rank, or
    TimeoutError where ranks wait for each other: after `patience` seconds, which begin when all are
    in the group.
    """
    context, limit, mark = multiprocessing.get_context("fork"), time.monotonic() + START, uuid4().hex
    met = context.Value("d", 0.0)  # when all were in the group, by the clock that processes share
    ranks, pipes, answers = [], [], [None] * size
    with TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                pipe, reply = context.Pipe(duplex=False)
                args = rank, int(size), f"file://{folder}/meeting", work, reply, met, mark
                ranks.append(context.Process(target=one_rank, args=args))
                pipes.append(pipe)
                ranks[rank].start()
                reply.close()  # the rank alone holds that end, which closes when it is gone
            readers = [
                threading.Thread(target=read, args=(pipe, rank, answers), daemon=True)
                for rank, pipe in enumerate(pipes)
            ]
            for reader in readers:  # while the ranks run: a pipe holds no more than 64 kB
                reader.start()
            while alive := [process.sentinel for process in ranks if process.is_alive()]:
                if time.monotonic() > limit:
                    break
                wait(alive, timeout=0.1)
                limit = met.value + patience if met.value else limit
            codes = [process.exitcode for process in ranks]  # None: it is still there
        finally:
            end(ranks, mark)
    for reader in readers:
        reader.join(1)  # what a rank has forked, and is not found, may hold its pipe open
    return judged(codes, answers, patience)


def judged(codes: list[int | None], answers: list[tuple | None], patience: float) -> list:
    """Return the values that ranks gave; raises what on_ranks raises. codes: their exit statuses."""
    for rank, code in enumerate(codes):  # first: what the others say then follows from it
        if code is not None and not answers[rank]:
            raise ChildProcessError(f"rank {rank} gave no answer: {ended(code)}")
    for _, error in filter(None, answers):
        if error:
            raise error
    if hung := [str(rank) for rank, code in enumerate(codes) if code is None]:
        late = f"waited for {patience:g} s: do all ranks call the collective?"
        raise TimeoutError(f"rank {' and '.join(hung)} {late}")
    return [value for value, _ in answers]


def read(pipe: Connection, rank: int, answers: list) -> None:
    """Keep what a rank sends, a value and an error; nothing where it ends before it has sent all."""
    with suppress(EOFError, OSError):
        try:
            answers[rank] = pipe.recv()
        except TypeError as error:  # an error whose class cannot be made anew from its text
            answers[rank] = None, error


def end(ranks: list[Process], mark: str) -> None:
    """End all ranks, and what they have started: by their process group, or by the mark."""
    with no_interrupt():
        for process in ranks:
            if process.pid:  # it was started
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # it may have no group of its own yet
                process.join()
        end_all(mark)


def one_rank(
    rank: int, size: int, where: str, work: Callable[[], Any], reply: Connection, met: Synchronized, mark: str
) -> None:
    """Join the group, and send what the function returns, or its error; each forked process calls it."""
    os.setsid()  # a process group of its own, by which what it forks is found
    os.environ |= HERE | {MARK: mark}  # what it starts is found by the mark
    threading.Thread(target=end_with_parent, args=[mark], daemon=True).start()
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        dist.barrier()  # or who is done early leaves while others still connect
        met.value = time.monotonic()
        reply.send((numbers(work()), None))
    except Exception as error:  # also where the answer is nothing that can be sent
        reply.send((None, error))


def end_with_parent(mark: str) -> None:
    """Wait until the learner's process is gone, as at a restart of its kernel; then end this rank."""
    wait([multiprocessing.parent_process().sentinel])
    end_all(mark)
    os.killpg(0, signal.SIGKILL)


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
