"""Start ranks and programs through one warm server, report how each ends, end each completely.

It runs in the driver process.
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
    """A launch that failed or took too long; the message names a rank and shows its last lines."""


class _Server:
    """The warm server of this process, and what it has reported."""

    def __init__(self) -> None:
        """Connect to the shared server, or start one, which imports torch for the first rank."""
        self._socket = connect() or self._start_one()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._sending, self.changed = threading.Lock(), threading.Condition()
        self._numbers = count(1)
        # By request number: process ids, and exit statuses in the order of the ends.
        self._started: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._abandoned: set[int] = set()  # requests for whose answer nobody waits
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
        """Record what the server reports until it is gone; it runs in a thread."""
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
        # The server's forks have ended with it, but not the processes that they had started.
        for ranks in list(_launches):
            if ranks.server is self and not self.ended.keys() >= {*ranks.numbers}:
                end_all(ranks.mark, signal.SIGKILL, ranks.process_ids)

    def start(self, request: Request, files: Sequence[int]) -> tuple[int, int]:
        """Have the server start a process; return the request number and the process id.

        Raises ChildProcessError if the server is gone, and OSError if a file is closed.
        """
        number = next(self._numbers)
        for descriptor in files:
            os.fstat(descriptor)  # a closed one raises before half of a request is sent
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
    """End a process whose request was abandoned."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


_server: _Server | None = None
_launches: "weakref.WeakSet[Processes]" = weakref.WeakSet()


def warm_server() -> _Server:
    """Return the server of this process; start a new one if there is none, or it is gone."""
    global _server
    if _server is None or _server.is_gone:
        _server = _Server()
    return _server


def _in_forked_child() -> None:
    """Let go of the server, which ends its processes when nobody holds its sockets.

    A loader's worker, or another child that this process forks, would hold them past its end.
    """
    global _server
    if _server is not None:
        _server.let_go()
    _server = None


os.register_at_fork(after_in_child=_in_forked_child)


class Processes:
    """The processes of one launch, each in its own session; ended together.

    The processes that they start are found by a mark in the environment and by process group.
    """

    def __init__(self) -> None:
        """Start no process yet."""
        self.mark = uuid4().hex
        self.process_ids: list[int] = []
        self.numbers: list[int] = []  # the request numbers, in the same order
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
        """Start one more rank, which calls a function; it may be defined in a cell.

        files: descriptors that become its 0, 1, 2 and so on; None, or missing, for no input and for
        this process's own output. modules: what the server imports first; if None, the course's
        modules that this process has imported.
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
        """Start one more process, which runs a program."""
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
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 only its descriptor is needed
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
        """Return the exit status of each: negative for a signal, None while it runs."""
        gone = -signal.SIGKILL if self.server.is_gone else None
        return [self.server.ended.get(number, gone) for number in self.numbers]

    def end_order(self) -> list[int]:
        """List the ranks that have ended, in the order of their ends."""
        ranks = {number: rank for rank, number in enumerate(self.numbers)}
        return [ranks[number] for number in list(self.server.ended) if number in ranks]

    def wait(self, seconds: float, rank: int | None = None) -> bool:
        """Wait until all ranks, or one, have ended; False if they have not after `seconds`."""
        with self.server.changed:
            return self.server.changed.wait_for(lambda: not self._is_left(rank), seconds)

    def _is_left(self, rank: int | None) -> bool:
        """Whether any process, or this one, still runs."""
        statuses = self.statuses()
        return None in (statuses if rank is None else statuses[rank : rank + 1])

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        if self.statuses()[rank] is None:
            with suppress(ProcessLookupError):
                os.kill(self.process_ids[rank], number)

    def end(self, first: int = signal.SIGKILL) -> None:
        """End all and their child processes: with the first signal, then with SIGKILL."""
        with no_interrupt():
            end_all(self.mark, first, self.process_ids)
            for rank in range(len(self.process_ids)):
                self.send_signal(rank, signal.SIGKILL)  # it may not lead a session yet
            self.wait(SURE)


def end_launches() -> None:
    """End all launches of this process."""
    for launch in list(_launches):
        launch.end()


def wait_for_an_end(*launches: Processes, seconds: float) -> None:
    """Return when one more rank of these launches has ended, or after `seconds`."""
    before = [launch.statuses().count(None) for launch in launches]
    end = time.monotonic() + seconds
    for server in {launch.server for launch in launches}:
        with server.changed:
            server.changed.wait_for(
                lambda: before != [launch.statuses().count(None) for launch in launches],
                max(0.0, end - time.monotonic()),
            )
