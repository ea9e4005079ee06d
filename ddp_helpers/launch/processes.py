"""Start processes that bear a mark, read their lines, and end whatever they have left behind.

The three engines of this room call it, in the learner's process: launchers (`launch`), ranks that
stay (`ranks`) and forked ranks (`forked`).
"""

import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import IO, TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# An environment variable by which every process of a launch is found again.
MARK = "DDP_COURSE_LAUNCH"
POLITE, SURE = 3.0, 5.0  # seconds that processes have after a first signal, and after SIGKILL


# ---- interrupts


@contextmanager
def _interrupt_handler(handler: Callable | signal.Handlers) -> Iterator[None]:
    """Let this handle SIGINT in the block; does nothing in a thread, which gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        shell = _shell()
        if shell and signal.getsignal(signal.SIGINT) != handler:  # an interrupt came: see stop_once
            _at_the_next_cell(shell, partial(signal.signal, signal.SIGINT, before))
        else:
            signal.signal(signal.SIGINT, before)


def _shell() -> "InteractiveShell | None":
    """The shell of the notebook, if this process is its kernel; a command needs no IPython."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _at_the_next_cell(shell: "InteractiveShell", call: Callable[[], object]) -> None:
    """Call this once, before IPython runs its next cell."""

    def call_once(info: object) -> None:
        shell.events.unregister("pre_run_cell", call_once)
        call()

    shell.events.register("pre_run_cell", call_once)


def no_interrupt() -> AbstractContextManager:
    """Ignore interrupts in the block, which ends processes: half done, it would leave some."""
    return _interrupt_handler(signal.SIG_IGN)


def one_interrupt() -> AbstractContextManager:
    """Raise KeyboardInterrupt at the first interrupt in the block, and ignore those after it.

    Who presses stop twice must not stop what the first press has begun. In IPython the later ones
    are ignored until the next cell: this one has still to show what the first has stopped.
    """

    def stop_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    return _interrupt_handler(stop_once)


# ---- endings


def exit_text(code: int | None) -> str:
    """Say an exit status in words: None for a process that is still there, below 0 for a signal."""
    if code is None:
        return "still there at the time limit"
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def marked_processes(
    mark: str, name: str = MARK, groups: Collection[int] = ()
) -> list[psutil.Process]:
    """List the processes of a launch, also those whose parent is gone.

    They have this mark in their environment, or are in one of these process groups: a process that
    was forked, and has executed nothing, shows the environment of its parent. Not listed are those
    of another user, and one that left its group and was started without the mark (`env -i`).
    """
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it is gone, or another user's
            in_group = bool(groups) and os.getpgid(process.pid) in groups
            if (in_group or process.environ().get(name) == mark) and _is_alive(process):
                processes.append(process)
    return processes


def _is_alive(process: psutil.Process) -> bool:
    """Say whether a process has not ended; a zombie, which nobody has asked for its status, has."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_all(mark: str, first: int = signal.SIGTERM, groups: Collection[int] = ()) -> None:
    """End what is left of a launch, as `marked` finds it: by the first signal, then by SIGKILL."""
    for number, patience in ((first, POLITE), (signal.SIGKILL, SURE)):
        processes = marked_processes(mark, groups=groups)
        if not processes:
            return
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        # Without wait(), which would take the exit status from who has started the process.
        limit = time.monotonic() + patience
        while any(map(_is_alive, processes)) and time.monotonic() < limit:
            time.sleep(0.01)


class Guard:
    """A process that ends a launch if this one is gone first, as when its kernel is started anew.

    It waits at the other end of a pipe, which closes when this process ends, however it ends.
    """

    def __init__(self, mark: str) -> None:
        """Start the guard of the launch with this mark."""
        self.groups: list[int] = []
        read_end, self._pipe = os.pipe()
        command = [sys.executable, "-m", "ddp_helpers.launch.guard", mark]
        try:
            self._process = subprocess.Popen(command, stdin=read_end, start_new_session=True)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read_end)

    def add_group(self, group: int) -> None:
        """Have it end this process group, too."""
        self.groups.append(group)
        with suppress(BrokenPipeError):  # the guard itself was killed
            os.write(self._pipe, f"{group}\n".encode())

    def leave(self) -> None:
        """Close the pipe in a process that was forked, or it would stay open without this one."""
        os.close(self._pipe)

    def close(self) -> None:
        """End the guard, if it is there: the launch has ended."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)


@contextmanager
def guarded_launch(mark: str, first: int = signal.SIGTERM) -> Iterator[None]:
    """End all of a launch after the block, also when this process is killed in it.

    first: the signal that its processes get before SIGKILL.
    """
    guard = Guard(mark)
    try:
        yield
    finally:
        with no_interrupt():
            end_all(mark, first)
            guard.close()


# ---- processes that are read


@contextmanager
def started_processes(
    commands: Sequence[list[str]],
    environments: Sequence[Mapping[str, str]],
    stdin: int = subprocess.DEVNULL,
    first: int = signal.SIGTERM,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start each command in its environment, and after the block end all that is left of them.

    Their stdout is a pipe, which also has what they write to stderr. first: the signal that they
    get before SIGKILL. None of them stays a zombie.
    """
    mark = uuid.uuid4().hex
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with guarded_launch(mark, first):
            for command, environment in zip(commands, environments, strict=True):
                process = subprocess.Popen(
                    command,
                    env={**environment, MARK: mark},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                processes.append(process)
            yield processes
    finally:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SURE)


def _queue_lines(output: IO[bytes], lines: queue.Queue[str | None]) -> None:
    """Put each line of a process into the queue, and None after the last."""
    for line in io.TextIOWrapper(output, errors="replace"):
        lines.put(line.rstrip("\n"))
    lines.put(None)


def lines_of(
    commands: Sequence[list[str]],
    env: Mapping[str, str],
    timeout: float,
    idle: Callable[[], None] = lambda: None,
) -> Generator[str | list[int], None, None]:
    """Start the commands together and yield their lines; at last, the list of their exit statuses.

    timeout: seconds. idle: called while no line comes. Raises TimeoutError. Closed early, by an
    interrupt or an error in the caller, it ends all their processes.
    """
    limit = time.monotonic() + timeout
    lines: queue.Queue[str | None] = queue.Queue()
    with started_processes(commands, [env] * len(commands)) as processes:
        for process in processes:
            threading.Thread(target=_queue_lines, args=[process.stdout, lines], daemon=True).start()
        open_pipes = len(processes)
        while open_pipes:
            if time.monotonic() > limit:  # also where lines never stop coming
                raise TimeoutError
            try:
                line = lines.get(timeout=0.1)
            except queue.Empty:
                idle()
                continue
            if line is None:
                open_pipes -= 1
            else:
                yield line
        try:
            statuses = [process.wait(max(0.1, limit - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:  # it closed its output, but is still there
            raise TimeoutError from None
    yield statuses
