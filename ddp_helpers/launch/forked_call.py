"""Call a function on ranks that the warm server forks; return its value on each.

It runs in the driver process; the function may be defined in a cell.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import cloudpickle
import torch.distributed as dist

from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.launchers import LOOPBACK_ONLY, clean_environment
from ddp_helpers.launch.processes import exit_text

START = 90.0  # seconds that ranks have to form their group, even on a busy machine
PATIENCE = 10.0  # seconds that they then have for the call, which needs milliseconds
_QUIET = 2.0  # seconds after which a line says that they are waiting
_REPLY = 3  # the descriptor on which a rank answers


class Answer(NamedTuple):
    """The value that the function returned on one rank, or the error that it raised."""

    value: Any
    error: Exception | None


class _Replies:
    """The replies of the ranks: when each joined the group, and its answer; a thread reads each."""

    def __init__(self) -> None:
        """Start with no replies."""
        self.met: dict[int, float] = {}  # by rank, by time.monotonic()
        self.answers: dict[int, Answer] = {}  # by rank, in the order in which they come
        self._readers: list[threading.Thread] = []

    def listen(self, rank: int, pipe: int) -> None:
        """Read what this rank sends while it runs: a pipe holds no more than 64 kB."""
        reader = threading.Thread(target=self._read, args=(rank, Connection(pipe)), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, rank: int, pipe: Connection) -> None:
        with suppress(EOFError, OSError), pipe:
            try:
                told = pipe.recv()
                if not isinstance(told, Answer):  # a rank that failed sends one before it joins
                    self.met[rank] = told
                    told = pipe.recv()
            except TypeError as error:  # its class cannot be rebuilt from its text
                told = Answer(None, error)
            self.answers[rank] = told

    def finish(self) -> None:
        """Wait for replies in transit; a child of a rank may hold its pipe open."""
        for reader in self._readers:
            reader.join(1)


def on_ranks(size: int, work: Callable[[], Any], patience: float = PATIENCE) -> list:
    """Call a function on `size` ranks of one group, and return its value on each.

    Tensors are returned as lists. It prints a line if this takes a while. Raises ChildProcessError
    if a rank ended without an answer, or the error of the rank that failed first, or TimeoutError
    if ranks wait for each other: `patience` seconds after all are in the group.
    """
    size, limit = int(size), time.monotonic() + START
    environment = {**clean_environment(), **LOOPBACK_ONLY, "OMP_NUM_THREADS": "1"}
    replies, ranks = _Replies(), Processes()
    # Pickled apart from the call: a rank that cannot unpickle it returns that error in its Answer.
    sent = cloudpickle.dumps(work)
    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        try:
            for rank in range(size):
                pipe, reply = os.pipe()
                replies.listen(rank, pipe)
                arguments = rank, size, meeting, sent
                try:
                    files = [None, None, None, reply]
                    ranks.call(_answer, *arguments, environment=environment, files=files)
                finally:  # the rank alone holds that end, which closes when it ends
                    os.close(reply)
            says = f"the ranks wait for each other, or work: up to {patience:g} s"
            while not ranks.wait(0.1) and time.monotonic() < limit:
                if len(replies.met) == size:
                    limit = max(replies.met.values()) + patience
                    if says and limit - time.monotonic() < patience - _QUIET:
                        print(says, flush=True)
                        says = ""
            statuses, order, in_time = ranks.statuses(), ranks.end_order(), {*replies.answers}
        finally:
            ranks.end()
    replies.finish()
    # When hung ranks are ended, one of them can still report that another is gone.
    late = [rank for rank, status in enumerate(statuses) if status is None and rank not in in_time]
    answers = {rank: answer for rank, answer in replies.answers.items() if rank not in late}
    return _values(statuses, order, answers, patience)


def _values(
    statuses: list[int | None],
    end_order: list[int],
    answers: dict[int, Answer],
    patience: float,
) -> list:
    """Return the value of each rank, or raise what on_ranks raises."""
    for rank in end_order:  # first: the errors of the others follow from it
        if statuses[rank] is not None and rank not in answers:
            raise ChildProcessError(f"rank {rank} gave no answer: {exit_text(statuses[rank])}")
    if errors := [answer.error for answer in answers.values() if answer.error]:
        # The other ranks see a failed rank as a broken connection.
        causes = [error for error in errors if "by peer" not in str(error)]
        raise (causes or errors)[0]
    if hung := [str(rank) for rank, status in enumerate(statuses) if status is None]:
        late = f"waited for {patience:g} s: do all ranks call the collective?"
        raise TimeoutError(f"rank {' and '.join(hung)} {late}")
    return [answers[rank].value for rank in range(len(statuses))]


def _answer(rank: int, size: int, meeting: str, work: bytes) -> None:
    """Join the group, and send the function's value or its error; each rank calls it."""
    reply = Connection(_REPLY, readable=False)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        dist.barrier()  # or a rank that is done early leaves while others still connect
        reply.send(time.monotonic())
        answer = Answer(_without_tensors(cloudpickle.loads(work)()), None)
        reply.send(answer)
    except Exception as error:  # including an answer that cannot be pickled
        reply.send(Answer(None, error))


def _without_tensors(value: Any) -> Any:
    """Turn tensors into lists: a tensor is sent as a file, which is gone with its process."""
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
