"""Call a function on ranks that are forked from this process; return what it returns on each.

The judges of exercises call it, in the learner's process: a function of a cell cannot be pickled.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_helpers.launch.forked import ForkedRanks, wait_for_an_end
from ddp_helpers.launch.launchers import LOOPBACK_ONLY
from ddp_helpers.launch.processes import exit_text

START = 90.0  # seconds that ranks have to form their group, also on a busy machine
PATIENCE = 10.0  # seconds that they have from then on for a case, which needs milliseconds


class Answer(NamedTuple):
    """What the function gave on one rank, or the error with which it ended."""

    value: Any
    error: Exception | None


def on_ranks(size: int, work: Callable[[], Any], patience: float = PATIENCE) -> list:
    """Call a function on so many ranks of one group, and return what it returns on each.

    Tensors come as lists. Raises ChildProcessError where a rank ended without an answer, or the
    error of the rank that failed first, or TimeoutError where ranks wait for each other: after
    `patience` seconds, which begin when all are in the group.
    """
    context = multiprocessing.get_context("fork")
    met = context.Value("d", 0.0)  # when all were in the group, by the clock that processes share
    answers: dict[int, Answer] = {}  # by rank, in the order in which they come
    pipes: list[Connection] = []
    readers: list[threading.Thread] = []
    limit = time.monotonic() + START
    ranks = ForkedRanks("fork")
    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        try:
            for rank in range(size):
                pipe, reply = context.Pipe(duplex=False)
                pipes.append(pipe)
                with reply:  # the rank alone holds that end, which closes when it is gone
                    ranks.start(_answer, rank, int(size), meeting, work, reply, met)
            # Read while the ranks run: a pipe holds no more than 64 kB.
            for rank, pipe in enumerate(pipes):
                arguments = pipe, rank, answers
                readers.append(threading.Thread(target=_read, args=arguments, daemon=True))
                readers[rank].start()
            while None in ranks.statuses() and time.monotonic() < limit:
                wait_for_an_end(ranks, seconds=0.1)
                limit = met.value + patience if met.value else limit
            statuses, in_time = ranks.statuses(), {*answers}
        finally:
            ranks.end()
    for reader in readers:
        reader.join(1)  # what a rank has forked, and is not found, may hold its pipe open
    # Of ranks that waited to the end, one that is ended can still tell of another that is gone.
    late = [rank for rank, status in enumerate(statuses) if status is None and rank not in in_time]
    answers = {rank: answer for rank, answer in answers.items() if rank not in late}
    return _values(statuses, ranks.end_order, answers, patience)


def _values(
    statuses: list[int | None],
    end_order: list[int],
    answers: dict[int, Answer],
    patience: float,
) -> list:
    """Return the value of each rank, or raise what on_ranks raises."""
    for rank in end_order:  # first: what the others say then follows from it
        if statuses[rank] is not None and rank not in answers:
            raise ChildProcessError(f"rank {rank} gave no answer: {exit_text(statuses[rank])}")
    if errors := [answer.error for answer in answers.values() if answer.error]:
        # A broken connection is what the others notice of a rank that failed.
        causes = [error for error in errors if "by peer" not in str(error)]
        raise (causes or errors)[0]
    if hung := [str(rank) for rank, status in enumerate(statuses) if status is None]:
        late = f"waited for {patience:g} s: do all ranks call the collective?"
        raise TimeoutError(f"rank {' and '.join(hung)} {late}")
    return [answers[rank].value for rank in range(len(statuses))]


def _read(pipe: Connection, rank: int, answers: dict[int, Answer]) -> None:
    """Keep what a rank sends; nothing where it ends before it has sent all."""
    with suppress(EOFError, OSError):
        try:
            answers[rank] = pipe.recv()
        except TypeError as error:  # an error whose class cannot be made anew from its text
            answers[rank] = Answer(None, error)


def _answer(
    rank: int,
    size: int,
    meeting: str,
    work: Callable[[], Any],
    reply: Connection,
    met: Synchronized,
) -> None:
    """Join the group, and send what the function returns, or its error; each rank calls it."""
    os.environ |= LOOPBACK_ONLY
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        dist.barrier()  # or who is done early leaves while others still connect
        met.value = time.monotonic()
        reply.send(Answer(_without_tensors(work()), None))
    except Exception as error:  # also where the answer is nothing that can be sent
        reply.send(Answer(None, error))


def _without_tensors(value: Any) -> Any:
    """Turn tensors into lists: sent, a tensor would be a file, which is gone with its process."""
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
