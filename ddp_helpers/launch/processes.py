"""Find the processes of a launch by their mark, end them, and handle one interrupt meanwhile.

It runs in the driver process, and in the warm server.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# An environment variable by which every process of a launch is found.
MARK = "DDP_COURSE_LAUNCH"
POLITE, SURE = 3.0, 5.0  # seconds that processes have after a first signal, and after SIGKILL


# ---- interrupts


@contextmanager
def _interrupt_handler(handler: Callable | signal.Handlers) -> Iterator[None]:
    """Handle SIGINT with `handler` in the block; do nothing in a thread, which gets no signals."""
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
    """Return the notebook's shell, if this process is its kernel; a command needs no IPython."""
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
    """Ignore interrupts in the block, which ends processes: interrupted, it would leave some."""
    return _interrupt_handler(signal.SIG_IGN)


def one_interrupt() -> AbstractContextManager:
    """Raise KeyboardInterrupt at the first interrupt in the block, and ignore those after it.

    A second press of stop must not stop what the first has started. In IPython later interrupts are
    ignored until the next cell: this cell still has to show what the first one stopped.
    """

    def stop_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    return _interrupt_handler(stop_once)


# ---- endings


def exit_text(code: int | None) -> str:
    """Describe an exit status: None for a process that still runs, negative for a signal."""
    if code is None:
        return "still there at the time limit"
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def marked_processes(
    mark: str, name: str = MARK, groups: Collection[int] = ()
) -> list[psutil.Process]:
    """List the processes of a launch, including those whose parent is gone.

    They have this mark in their environment, or are in one of these process groups: a process that
    was forked, and has executed nothing, shows its parent's environment. It does not list another
    user's processes, nor one that left its group and was started without the mark (`env -i`).
    """
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it is gone, or belongs to another user
            in_group = bool(groups) and os.getpgid(process.pid) in groups
            if (in_group or process.environ().get(name) == mark) and is_alive(process):
                processes.append(process)
    return processes


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie, not yet waited for, has ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_all(mark: str, first: int = signal.SIGTERM, groups: Collection[int] = ()) -> None:
    """End the remaining processes of a launch (`marked_processes`): first with this signal."""
    end_found(lambda: marked_processes(mark, groups=groups), first)


def end_found(find: Callable[[], list[psutil.Process]], first: int = signal.SIGTERM) -> None:
    """End the processes found with the first signal, then the remaining ones with SIGKILL."""
    for number, patience in ((first, POLITE), (signal.SIGKILL, SURE)):
        processes = find()
        if not processes:
            return
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        # Without wait(), which would take the exit status from the parent process.
        limit = time.monotonic() + patience
        while any(map(is_alive, processes)) and time.monotonic() < limit:
            time.sleep(0.01)
