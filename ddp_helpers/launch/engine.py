"""Start ranks and programs through one warm server, hear how each ends, and end all of a launch.

It runs in the learner's process.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from uuid import uuid4

import cloudpickle

from ddp_helpers.launch.processes import MARK, SURE, end_all, no_interrupt
from ddp_helpers.launch.server import Request
from ddp_helpers.launch.shared import connect
from ddp_tools import PlainError


class LaunchError(PlainError, RuntimeError):
    """A launch that failed or took too long; the message names a rank and has its last lines."""


class _Server:
    """The server of this process, and what it has told."""

    def __init__(self) -> None:
        """Start it, where `shared_server` has not: it imports torch when a rank is asked for."""
        self._socket = connect() or self._start_one()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._sending, self.changed = threading.Lock(), threading.Condition()
        self._numbers = count(1)
        # By the number of the request: process ids, and exit statuses, the first end first.
        self._started: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._abandoned: set[int] = set()  # requests whose answer nobody waits for any more
        self.is_gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _start_one(self) -> socket.socket:
        """Start a server for this process alone, and return the socket to it."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "ddp_helpers.launch.server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return ours

    def _listen(self) -> None:
        """Note what the server tells, until it is gone; a thread."""
        with suppress(EOFError, OSError):
            while True:
                number, process_id, status = self._connection.recv()
                with self.changed:
                    if process_id is None:
                        self.ended[number] = status
                    elif number in self._abandoned:
                        _kill(process_id)
                    else:
                        self._started[number] = process_id
                    self.changed.notify_all()
        with self.changed:
            self.is_gone = True
            self.changed.notify_all()
        # What it had forked has ended with it, but not what that had started.
        for ranks in list(_launches):
            if ranks.server is self and not self.ended.keys() >= {*ranks.numbers}:
                end_all(ranks.mark, signal.SIGKILL, ranks.process_ids)

    def start(self, request: Request, files: Sequence[int]) -> tuple[int, int]:
        """Have it start something; return the number of the request, and the process id.

        Raises ChildProcessError where the server has gone, and OSError where a file is closed.
        """
        number = next(self._numbers)
        for descriptor in files:
            os.fstat(descriptor)  # a closed one is told before half of a request is sent
        try:
            with no_interrupt(), self._sending, suppress(BrokenPipeError):
                self._connection.send(tuple(request._replace(number=number)))
                socket.send_fds(self._socket, [b"."], files)
            with self.changed:
                self.changed.wait_for(lambda: number in self._started or self.is_gone)
                if number not in self._started:
                    raise ChildProcessError("the server of ranks is gone: start again")
                return number, self._started.pop(number)
        except BaseException:  # an interrupt: torch may be imported for seconds
            with self.changed:
                self._abandoned.add(number)
                if process_id := self._started.pop(number, None):
                    _kill(process_id)
            raise

    def let_go(self) -> None:
        """Close this process's ends of the sockets."""
        self._socket.close()
        self._connection.close()


def _kill(process_id: int) -> None:
    """End a process that nobody knows of."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


_server: _Server | None = None
_launches: "weakref.WeakSet[Processes]" = weakref.WeakSet()


def warm_server() -> _Server:
    """Return the server of this process; a new one if there is none, or it is gone."""
    global _server
    if _server is None or _server.is_gone:
        _server = _Server()
    return _server


def _in_forked_child() -> None:
    """Let go of the server, which ends what it has started when nobody holds its sockets.

    A loader's worker, or another child that this process forks, would hold them past its end.
    """
    global _server
    if _server is not None:
        _server.let_go()
    _server = None


os.register_at_fork(after_in_child=_in_forked_child)


class Processes:
    """The processes of one launch, each with a session of its own; ended together.

    What they start is found by the mark in its environment, and by its process group.
    """

    def __init__(self) -> None:
        """Start none yet."""
        self.mark = uuid4().hex
        self.process_ids: list[int] = []
        self.numbers: list[int] = []  # of the requests, in the same order
        self.server = warm_server()
        _launches.add(self)

    def call(
        self,
        function: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str],
        folder: str | os.PathLike | None = None,
        files: Sequence[int | None] = (),
        modules: list[str] | None = None,
    ) -> None:
        """Start one more rank, which calls a function, also one of a cell.

        files: descriptors that become its 0, 1, 2 and on; None, or missing, for no input and for
        this process's own output. modules: what the server imports first; if None, what this
        process has of the course.
        """
        call = cloudpickle.dumps((function, arguments))
        if modules is None:
            modules = [name for name in sys.modules if name.startswith("ddp_helpers.")]
        self._start(environment, folder, files, call=call, modules=modules)

    def run(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        folder: str | os.PathLike | None = None,
        files: Sequence[int | None] = (),
    ) -> None:
        """Start one more process, of another program."""
        self._start(environment, folder, files, program=list(program))

    def _start(
        self,
        environment: Mapping[str, str],
        folder: str | os.PathLike | None,
        files: Sequence[int | None],
        program: list[str] | None = None,
        call: bytes = b"",
        modules: list[str] | None = None,
    ) -> None:
        """Ask the server for a process."""
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 its descriptor is what is needed
            usual = [nothing.fileno(), 1, 2]
            given = [*files, *usual[len(files) :]]
            descriptors = [
                usual[number] if file is None else file for number, file in enumerate(given)
            ]
            request = Request(
                number=0,
                environment={**environment, MARK: self.mark},
                folder=str(folder or os.getcwd()),  # noqa: PTH109
                program=program or [],
                call=call,
                modules=modules or [],
                path=[os.path.abspath(path) for path in sys.path],  # noqa: PTH100 "" is here
            )
            number, process_id = self.server.start(request, descriptors)
            self.numbers.append(number)
            self.process_ids.append(process_id)

    def statuses(self) -> list[int | None]:
        """Return the exit status of each: below 0 for a signal, None while it is there."""
        gone = -signal.SIGKILL if self.server.is_gone else None
        return [self.server.ended.get(number, gone) for number in self.numbers]

    def end_order(self) -> list[int]:
        """List the ranks that have ended, the first one first."""
        ranks = {number: rank for rank, number in enumerate(self.numbers)}
        return [ranks[number] for number in list(self.server.ended) if number in ranks]

    def wait(self, seconds: float, rank: int | None = None) -> bool:
        """Wait until all have ended, or one rank; False where they have not in so many seconds."""
        with self.server.changed:
            return self.server.changed.wait_for(lambda: not self._is_left(rank), seconds)

    def _is_left(self, rank: int | None) -> bool:
        """Whether a process is still there, or this one."""
        statuses = self.statuses()
        return None in (statuses if rank is None else statuses[rank : rank + 1])

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        if self.statuses()[rank] is None:
            with suppress(ProcessLookupError):
                os.kill(self.process_ids[rank], number)

    def end(self, first: int = signal.SIGKILL) -> None:
        """End all, and what they have started: by the first signal, and then by SIGKILL."""
        with no_interrupt():
            end_all(self.mark, first, self.process_ids)
            for rank in range(len(self.process_ids)):
                self.send_signal(rank, signal.SIGKILL)  # it may lead no session yet
            self.wait(SURE)


def end_launches() -> None:
    """End all that this process has started."""
    for launch in list(_launches):
        launch.end()


def wait_for_an_end(*launches: Processes, seconds: float) -> None:
    """Return when one more rank of these launches has ended, or after so many seconds."""
    before = [launch.statuses().count(None) for launch in launches]
    end = time.monotonic() + seconds
    for server in {launch.server for launch in launches}:
        with server.changed:
            server.changed.wait_for(
                lambda: before != [launch.statuses().count(None) for launch in launches],
                max(0.0, end - time.monotonic()),
            )
