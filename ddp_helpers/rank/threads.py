"""Wait for the other threads of a process to be idle before it forks or ends.

The ranks of a notebook call it, before they join their group. It needs only the standard library.
"""

import atexit
import os
import sys
import threading
import time
from pathlib import Path

_REST = 1.0  # seconds that a fork or the end waits for the other threads


def wait_before_fork_and_exit() -> None:
    """Have this process wait until no other thread runs, before it forks a worker or ends.

    On Linux, for _REST seconds at most. A thread of gloo takes the GIL to free a tensor. A worker
    forked in that moment hangs before 3.12: https://github.com/python/cpython/issues/112275
    A process that ends in that moment is aborted (SIGABRT) before 3.14, although all is done:
    https://github.com/pytorch/pytorch/issues/38228
    """
    if sys.platform == "linux" and sys.version_info < (3, 12):
        os.register_at_fork(before=_wait_for_threads)
    if sys.platform == "linux" and sys.version_info < (3, 14):
        atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until no other thread of this process runs, for _REST seconds at most."""
    me, end = str(threading.get_native_id()), time.monotonic() + _REST
    tasks = Path("/proc/self/task")
    while any(_is_running(task) for task in tasks.iterdir() if task.name != me):
        if time.monotonic() > end:
            break
        time.sleep(0.001)


def _is_running(task: Path) -> bool:
    """Return whether a thread, by its folder in /proc, is running: state R of proc(5)."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2].startswith("R")
    except OSError:  # it has ended meanwhile
        return False
