"""Start launchers, read their lines as they come, and leave no process behind, whatever happens."""

import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

import psutil

MARK = "DDP_COURSE_LAUNCH"  # an environment variable by which every process of a launch is found again


def marked(mark: str, name: str = MARK) -> list[psutil.Process]:
    """Every process of a launch, also those whose parent is gone: those with this mark in their environment.

    Not found is one that was started with an environment without it (`env -i`), or by another user.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it is gone, or another user's
            continue
    return found


def end_all(mark: str) -> None:
    """End what is left of a launch: politely, then surely."""
    for number, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
        if not (left := marked(mark)):
            return
        for process in left:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=patience)


@contextmanager
def interrupt_by(handler: Callable | signal.Handlers) -> Iterator[None]:
    """Let this handle SIGINT in the block; threads get none, so that they change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def no_interrupt() -> AbstractContextManager:
    """Ignore interrupts in the block, which ends processes: half done, it would leave some behind."""
    return interrupt_by(signal.SIG_IGN)


def one_interrupt() -> AbstractContextManager:
    """Raise KeyboardInterrupt at the first interrupt in the block, and ignore those after it.

    Who presses stop twice must not stop what the first press has begun.
    """

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    return interrupt_by(first)


def ended(code: int | None) -> str:
    """Say an exit status in words: None for a process that is still there, below 0 for a signal."""
    if code is None:
        return "still there at the time limit"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit status {code}"


@contextmanager
def guarded(mark: str) -> Iterator[None]:
    """End all of a launch after the block, also when this process is killed in it, as by a restart of the kernel.

    A guard waits at the other end of a pipe, which closes when this process ends, however it ends.
    """
    command = [sys.executable, "-m", "ddp_helpers.launch.processes", mark]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        with no_interrupt():
            end_all(mark)
            guard.stdin.close()
            guard.wait()


def read(process: subprocess.Popen, arrived: queue.Queue) -> None:
    """Put each line of a process into the queue, and None after the last."""
    for line in process.stdout:
        arrived.put(line.rstrip("\n"))
    arrived.put(None)


@contextmanager
def started(commands: Sequence[list[str]], env: Mapping[str, str]) -> Iterator[list[subprocess.Popen]]:
    """Start the commands, and after the block end all that is left of them; none of them stays a zombie."""
    mark, processes = uuid.uuid4().hex, []
    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pipe |= {"text": True, "errors": "replace", "start_new_session": True}
    try:
        with guarded(mark):
            processes += [subprocess.Popen(command, env={**env, MARK: mark}, **pipe) for command in commands]
            yield processes
    finally:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)


def lines_of(
    commands: Sequence[list[str]],
    env: Mapping[str, str],
    timeout: float,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[str | list[int]]:
    """Start the commands together and yield their lines; at last, the list of their exit statuses.

    idle: called while no line comes. Raises TimeoutError. Closed early, by an interrupt or an error
    in the caller, it ends all their processes.
    """
    end = time.monotonic() + timeout
    arrived: queue.Queue[str | None] = queue.Queue()
    with started(commands, env) as processes:
        for process in processes:
            threading.Thread(target=read, args=[process, arrived], daemon=True).start()
        open_pipes = len(processes)
        while open_pipes:
            if time.monotonic() > end:  # also where lines never stop coming
                raise TimeoutError
            try:
                line = arrived.get(timeout=0.1)
            except queue.Empty:
                idle()
                continue
            open_pipes -= line is None
            if line is not None:
                yield line
        try:
            statuses = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:  # it closed its output, but is still there
            raise TimeoutError from None
    yield statuses


if __name__ == "__main__":
    sys.stdin.read()
    end_all(sys.argv[1])
