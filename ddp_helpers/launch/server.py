"""The warm server: it has imported torch, and forks what `engine` starts: ranks and programs.

The driver process runs it as a program, and sends requests through a socket. A forked rank starts
in hundredths of a second; a new Python would import torch for seconds. Each forked process leads
its own session, and ends with the server. When the driver process is gone, the server ends all of
them, orphans included. A shared server forks such a server for each process.
"""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil

from ddp_helpers.launch.processes import end_found

# What ranks need sooner or later: DDP, an optimizer's first step and the first backward(gradient)
# import the last two.
PRELOADED = ["torch", "torch.distributed", "torchvision.datasets"]
PRELOADED += ["torch._dynamo", "torch.fx.experimental.symbolic_shapes"]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_MOST_FILES = 8  # descriptors that a process is given


class Request(NamedTuple):
    """What to start: a program, or a pickled pair of a function and its arguments."""

    number: int  # the answer has the same number
    environment: dict[str, str]
    folder: str
    program: list[str]
    call: bytes
    modules: list[str]  # what the call needs, to be imported once, here
    path: list[str]  # sys.path of the requesting process


def _prctl(option: int, value: int) -> None:
    """Call prctl(2), if the system has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _serve(connection: Connection) -> None:
    """Start what is requested, until the other end of the connection has closed.

    Answers with (number, process id, None), and when the process ends, with (number, None, exit
    status).
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    files = socket.socket(fileno=os.dup(connection.fileno()))
    numbers: dict[int, int] = {}  # of requests, by process id
    with selectors.PollSelector() as selector, suppress(EOFError, OSError):
        selector.register(connection, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == wake:
                    os.read(wake, 4096)
                    continue
                request = Request(*connection.recv())
                given = socket.recv_fds(files, 1, _MOST_FILES)[1]
                ours = [connection.fileno(), files.fileno(), wake, woken]
                process_id = _fork(request, given, ours)
                numbers[process_id] = request.number
                connection.send((request.number, process_id, None))
            _tell_ends(numbers, connection)


def _tell_ends(numbers: dict[int, int], connection: Connection) -> None:
    """Report each process that has ended, and reap orphans."""
    with suppress(ChildProcessError):  # there are no children
        while True:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if not process_id:
                return
            if number := numbers.pop(process_id, 0):
                connection.send((number, None, os.waitstatus_to_exitcode(status)))


def _fork(request: Request, given: list[int], ours: list[int]) -> int:
    """Fork the requested process, and return its process id.

    given: descriptors that become 0, 1, 2 and so on; ours: the server's descriptors.
    """
    if request.call:
        for name in (*PRELOADED, *request.modules):
            with suppress(Exception):  # if the call needs it, its own import raises
                importlib.import_module(name)
        gc.freeze()  # or each rank would copy the memory pages of all objects
    process_id = os.fork()
    if process_id:
        for file in given:
            os.close(file)
        return process_id
    status = 1
    try:
        _become_a_process(request, given, ours)
        status = _call(request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _become_a_process(request: Request, given: list[int], ours: list[int]) -> None:
    """Set up the forked process: session, signals, files, environment; then execute a program."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file in ours:
        os.close(file)
    for number, file in enumerate(given):
        os.dup2(file, number)
    for file in given:
        if file >= len(given):
            os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if request.program:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(request.program[0], request.program)


def _call(request: Request) -> int:
    """Call the function, and return the exit status that a new Python would have."""
    import torch
    import torch.distributed as dist

    sys.path[:] = request.path
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
    atexit._clear()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    torch.default_generator.seed()  # or unseeded ranks would draw the same numbers
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if dist.is_available():
        dist.set_debug_level_from_env()
    status = 0
    try:
        function, arguments = pickle.loads(request.call)
        function(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    # As an interpreter does at its end, and multiprocessing in its forked processes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(Exception):  # the call may have replaced it
        sys.stdout.flush()
        sys.stderr.flush()
    return status & 0xFF


def _serve_to_the_end(connection: Connection) -> None:
    """Serve until the other end closes, and then end all started processes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        _serve(connection)
    finally:  # all descendants of this process
        end_found(lambda: psutil.Process().children(recursive=True))


def _listen(address: str) -> None:
    """Import torch, and fork a server for each connection to this address, until stdin closes."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a server's exit status
    with socket.socket(socket.AF_UNIX) as listener, selectors.PollSelector() as selector:
        listener.bind(address)
        listener.listen(64)
        print("listening", flush=True)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connected = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                _serve_as_if_started(Connection(connected.detach()))
                os._exit(0)
            connected.close()


def _serve_as_if_started(connection: Connection) -> None:
    """Serve as if the connecting process had started this one, in its environment and folder."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment, folder = connection.recv()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _serve_to_the_end(connection)


def main() -> None:
    """Serve at the argument: the descriptor of a socket, or the address of a shared server.

    The process that it serves has the other end of the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    where = sys.argv[1]
    if where.isdecimal():
        _serve_to_the_end(Connection(int(where)))
    else:
        _listen(where)
    os._exit(0)  # nothing is left to end, and triton 3.9 would list what it has not freed


if __name__ == "__main__":
    # Under the module's own name: in __main__ a fork while numpy has threads warns, from 3.12 on.
    from ddp_helpers.launch import server

    server.main()
