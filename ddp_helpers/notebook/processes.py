"""Start launchers, read their lines as they come, and leave no process behind, whatever happens."""

import ctypes
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

import psutil

MARK = "DDP_COURSE_LAUNCH"  # an environment variable by which every process of a launch is found again


class TimeLimit(Exception):
    """The launch took longer than it was given."""


def marked(mark: str) -> list[psutil.Process]:
    """Every process of a launch, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it is gone, or another user's
            continue
    return found


def end_all(mark: str) -> None:
    """End what is left of a launch: politely, then surely."""
    for number, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
        left = marked(mark)
        for process in left:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=patience)


def die_with_parent() -> None:
    """Ask Linux for a SIGTERM when the notebook's kernel dies, so that a restart leaves no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def lines_of(commands: Sequence[list[str]], env: Mapping[str, str], timeout: float) -> Iterator[str | list[int]]:
    """Start the commands together and yield their lines; at last, the list of their exit statuses.

    Raises TimeLimit. Closed early, by an interrupt or an error in the caller, it ends all their processes.
    """
    mark, end = uuid.uuid4().hex, time.monotonic() + timeout
    arrived: queue.Queue[str | None] = queue.Queue()

    def read(process: subprocess.Popen) -> None:
        for line in process.stdout:
            arrived.put(line.rstrip("\n"))
        arrived.put(None)

    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pipe |= {"text": True, "errors": "replace", "start_new_session": True, "preexec_fn": die_with_parent}
    try:
        processes = [subprocess.Popen(command, env={**env, MARK: mark}, **pipe) for command in commands]
        for process in processes:
            threading.Thread(target=read, args=[process], daemon=True).start()
        open_pipes = len(processes)
        while open_pipes:
            try:
                line = arrived.get(timeout=max(0, min(0.5, end - time.monotonic())))
            except queue.Empty:
                if time.monotonic() > end:
                    raise TimeLimit from None
                continue
            open_pipes -= line is None
            if line is not None:
                yield line
        yield [process.wait() for process in processes]
    finally:
        end_all(mark)
