"""Fork ranks from a process that has torch; note which one ends first; end all that they started.

`forked_call` and `forked_script` build on it, in the learner's process. A forked rank is there in a
tenth of a second, where a new Python would import torch for seconds.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Literal
from uuid import uuid4

from ddp_helpers.launch.processes import MARK, SURE, Guard, end_all, no_interrupt


class ForkedRanks:
    """Processes that are forked, and call a function; each leads a process group of its own.

    What a rank forks is found by its group, and what it executes by the mark in the environment.
    """

    def __init__(self, start_method: Literal["fork", "forkserver"]) -> None:
        """Start no rank yet.

        start_method: "fork" copies this process, with all functions of the notebook; "forkserver"
        copies a server, which has imported torch: its ranks get what can be pickled.
        """
        self.mark = uuid4().hex
        self.processes: list[BaseProcess] = []
        self.end_order: list[int] = []  # the ranks that have ended, the first one first
        self._guard = Guard(self.mark)
        self._forked_here = start_method == "fork"
        self._process: type[BaseProcess] = (
            multiprocessing.get_context("fork").Process
            if start_method == "fork"
            else multiprocessing.get_context("forkserver").Process
        )

    def start(self, target: Callable[..., None], *arguments: object) -> None:
        """Start one more rank, which calls the target."""
        # The server's children have no end of the guard's pipe.
        guard = self._guard if self._forked_here else None
        process = self._process(target=_be_rank, args=(self.mark, guard, target, *arguments))
        self.processes.append(process)
        process.start()
        if process.pid:
            self._guard.add_group(process.pid)

    def statuses(self) -> list[int | None]:
        """Return the exit status of each rank: below 0 for a signal, None while it is there."""
        statuses = [process.exitcode for process in self.processes]
        ended = [rank for rank, status in enumerate(statuses) if status is not None]
        self.end_order += sorted({*ended} - {*self.end_order}, key=self._last_sign)
        return statuses

    def _last_sign(self, rank: int) -> float:
        """Return when a rank last showed a sign: of two that have ended since, who was first."""
        return rank

    def end(self, first: int = signal.SIGKILL) -> None:
        """End all ranks, and what they have started: by the first signal, and then by SIGKILL."""
        with no_interrupt():
            end_all(self.mark, first, self._guard.groups)
            for process in self.processes:
                if process.pid:
                    process.kill()  # it may have no group of its own yet
                    process.join(SURE)
            self._guard.close()


def wait_for_an_end(*runs: ForkedRanks, seconds: float) -> None:
    """Return as soon as one more rank of these runs has ended, or after so many seconds."""
    processes = [process for run in runs for process in run.processes]
    wait([process.sentinel for process in processes if process.exitcode is None], timeout=seconds)


def _be_rank(
    mark: str,
    guard: Guard | None,
    target: Callable[..., None],
    *arguments: object,
) -> None:
    """Be one rank, in the process that was forked: call the target."""
    os.setsid()
    os.environ[MARK] = mark
    if guard:
        guard.leave()
    target(*arguments)
