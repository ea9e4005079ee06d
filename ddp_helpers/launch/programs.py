"""Start programs, such as launchers, and read their lines until they have ended.

It runs in the driver process.
"""

import io
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence

from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.launchers import TORCHRUN


def _queue_lines(file: int, lines: queue.Queue[str | None]) -> None:
    """Put each line of a process into the queue, and None after the last."""
    for line in io.TextIOWrapper(os.fdopen(file, "rb"), errors="replace"):
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _torchrun(arguments: Sequence[str]) -> None:
    """Run torchrun in this process; the forked process calls it."""
    from torch.distributed.run import main

    from ddp_tools.rendezvous import listen_narrowly

    listen_narrowly()
    main(list(arguments))


def lines_of(
    commands: Sequence[list[str]],
    env: Mapping[str, str],
    timeout: float,
    idle: Callable[[], None] = lambda: None,
) -> Generator[str | list[int], None, None]:
    """Start the commands together and yield their lines; finally, the list of exit statuses.

    The course's torchrun is forked from the warm server, whose torch it shares; the ranks that it
    starts are new processes, as usual. timeout: seconds. idle: called while no line comes. Raises
    TimeoutError. Closed early, by an interrupt or an error in the caller, it ends all their
    processes.
    """
    limit = time.monotonic() + timeout
    lines: queue.Queue[str | None] = queue.Queue()
    started = Processes()
    try:
        for command in commands:
            output, given = os.pipe()
            threading.Thread(target=_queue_lines, args=[output, lines], daemon=True).start()
            try:
                files = [None, given, given]
                if command[: len(TORCHRUN)] == TORCHRUN:  # the server has imported its torch
                    arguments = command[len(TORCHRUN) :]
                    started.call(_torchrun, arguments, environment=env, files=files)
                else:
                    started.run(command, env, files=files)
            finally:
                os.close(given)
        open_pipes = len(commands)
        while open_pipes:
            if time.monotonic() > limit:  # even if lines never stop coming
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
        if not started.wait(max(0.1, limit - time.monotonic())):
            raise TimeoutError  # it closed its output, but still runs
        statuses = [status or 0 for status in started.statuses()]
    finally:
        started.end(signal.SIGTERM)
    yield statuses
