"""Processes of one group that run cell after cell, and keep the variables.

`ranks` starts them for `%%ranks`, in the driver process; each runs `ddp_helpers.rank.cells`.
"""

import io
import json
import os
import queue
import re
import signal
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from ddp_helpers.launch.engine import LaunchError, Processes
from ddp_helpers.launch.launchers import rank_environments
from ddp_helpers.launch.processes import exit_text, no_interrupt, one_interrupt
from ddp_helpers.launch.screen import WIDEST, Screen, cut, shorten_paths

# Seconds that a start or a cell may take, if the cell's first line has no limit.
LIMIT = 120.0
# Seconds that a rank has to report its line, or to end after it has closed its output.
ANSWER = 10.0
# Seconds that the other ranks have when one has failed: they may wait for it in a collective.
GRACE = 2.0
# How much of a rank's output of one cell is shown.
MOST_LINES, MOST_CHARACTERS = 1000, 200_000

_ENDED = "ranks were ended, with their variables: the next cell starts new ones"


class Stopped(LaunchError):
    """A cell that was interrupted, or whose ranks did not start: `fails` does not expect that."""


class UnknownName(LaunchError):
    """No rank had a name that the cell used: they may be new, without earlier cells' variables."""


@dataclass
class _Shown:
    """How much of a rank's output of one cell is shown, and how many lines are hidden."""

    lines: int = 0
    characters: int = 0
    hidden_lines: int = 0

    def add(self, screen: Screen, rank: int, line: str) -> None:
        """Show a line, if the rank has not printed too much."""
        if self.lines == MOST_LINES or self.characters > MOST_CHARACTERS:
            self.hidden_lines += 1
            return
        screen.add(f"rank {rank}", line)
        self.lines += 1
        self.characters += min(len(line), WIDEST)

    def finish(self, screen: Screen, rank: int) -> None:
        """Show how many lines were hidden."""
        if self.hidden_lines:
            screen.add(f"rank {rank}", f"… and {self.hidden_lines} more lines")


class ResidentRanks:
    """`size` processes of one group on this machine, which run cells and keep their variables.

    busy: whether the start, or a cell, still runs on a rank; waiting: the ranks on which it runs.
    cells: the number of cells so far.
    """

    def __init__(self, size: int) -> None:
        """Start the processes; the first cell waits until they have formed their group."""
        self.size, self.cells = size, 0
        self.busy, self.waiting = True, set(range(size))
        self._mark = uuid.uuid4().hex  # ends a cell's output: no other process has it
        # The rendezvous file: at a port, any user of this machine could change their messages.
        self._meeting = TemporaryDirectory()
        # Pairs of rank and line, None after its last. A rank that prints more than is read waits.
        self._output: queue.Queue[tuple[int, str | None]] = queue.Queue(MOST_LINES)
        self._readers: list[threading.Thread] = []
        self._inputs: list[io.FileIO] = []
        self.processes = Processes()
        try:
            for environment in rank_environments(size, {}):
                self._start(environment)
            self._send(self._mark)
            self._send(f"{self._meeting.name}/store")
        except BaseException:
            self.end()
            raise

    def _start(self, environment: dict[str, str]) -> None:
        """Start one more rank, and a thread that reads its lines."""
        (requests, ours), (output, theirs) = os.pipe(), os.pipe()
        self._inputs.append(io.FileIO(ours, "w"))
        reader = threading.Thread(target=self._read, args=[len(self._readers), output], daemon=True)
        self._readers.append(reader)
        reader.start()
        try:
            self.processes.call(_serve, environment=environment, files=[requests, theirs, theirs])
        finally:
            os.close(requests)
            os.close(theirs)

    def _read(self, rank: int, output: int) -> None:
        """Put each line of a rank into the queue, and None when it is gone; one thread per rank."""
        for line in io.TextIOWrapper(io.FileIO(output), errors="replace", newline="\n"):
            last_state = line.rstrip("\r\n").rpartition("\r")[2]  # of a bar that was redrawn
            self._output.put((rank, last_state))
        self._output.put((rank, None))

    def _send(self, line: str) -> None:
        """Write a line to all ranks."""
        for rank_input in self._inputs:
            rest = f"{line}\n".encode()
            with suppress(BrokenPipeError):  # its lines show what ended it
                while rest:
                    rest = rest[rank_input.write(rest) :]

    def alive(self) -> bool:
        """Return whether every process still runs."""
        return not any(status is not None for status in self.processes.statuses())

    def end(self) -> None:
        """End all ranks and their child processes; interrupts are ignored."""
        with no_interrupt():
            self.processes.end()  # by SIGKILL at once: a cell may handle SIGTERM
            for rank_input in self._inputs:
                rank_input.close()
            self._meeting.cleanup()
            limit = time.monotonic() + 1
            while any(map(threading.Thread.is_alive, self._readers)) and time.monotonic() < limit:
                with suppress(queue.Empty):  # let them come to the end of their pipes
                    self._output.get(timeout=0.01)

    def _show_output(self, screen: Screen, limit: float, tracebacks: dict[int, str]) -> None:
        """Show what the ranks print until all have run the cell.

        tracebacks: gets one for each rank that failed. Raises TimeoutError if ranks are not done
        after `limit` seconds, or GRACE after a rank has failed; and ChildProcessError if one has
        ended.
        """
        self.busy, self.waiting = True, set(range(self.size))
        shown = [_Shown() for _ in range(self.size)]
        end = time.monotonic() + limit
        while self.waiting:
            rank, line = self._next_line(screen, end)
            text, mark, answer = line.partition(self._mark)
            if text or not mark:
                shown[rank].add(screen, rank, text)
            if mark:
                shown[rank].finish(screen, rank)
                self.waiting.discard(rank)
                if traceback := json.loads(answer):
                    tracebacks[rank] = traceback
                    end = min(end, time.monotonic() + GRACE)
        self.busy = False

    def _next_line(self, screen: Screen, end: float) -> tuple[int, str]:
        """Wait for the next line of any rank; returns the rank and the line.

        end: when to give up, by time.monotonic(). Raises TimeoutError, and ChildProcessError if a
        rank has ended.
        """
        while (seconds := end - time.monotonic()) > 0:
            try:
                rank, line = self._output.get(timeout=min(seconds, 0.2))
            except queue.Empty:
                screen.refresh()
                for rank in self.waiting:  # its child may hold the pipe open
                    if self.processes.statuses()[rank] is not None:
                        raise ChildProcessError(self._ending(rank)) from None
                continue
            if line is None:
                raise ChildProcessError(self._ending(rank))
            return rank, line
        raise TimeoutError

    def _ending(self, rank: int) -> str:
        """Describe how a rank has ended."""
        if not self.processes.wait(ANSWER, rank):
            return f"rank {rank} has closed its output"
        return f"rank {rank} is gone: {exit_text(self.processes.statuses()[rank])}"

    def _positions(self, name: str, cell: str) -> str:
        """Describe at which line of the cell each waiting rank is, one line of text per position.

        name: the cell's name in tracebacks; "" before the first cell, for which it returns "".
        """
        ranks: dict[str, list[str]] = {}
        cell_lines = cell.split("\n")
        for rank in sorted(self.waiting) if name else ():
            number = self._line_number(rank, name)
            if number is None:
                position = "does not say where it is"
            elif number == 0:
                position = "is past the cell's last line and waits for its GPU"
            else:
                # The cell's first line has number 2: `%%ranks` is line 1.
                position = f"in line {number}, `{cell_lines[number - 2].strip()}`"
            ranks.setdefault(position, []).append(str(rank))
        return "".join(f"rank {', '.join(at)} {position}\n" for position, at in ranks.items())

    def _line_number(self, rank: int, name: str) -> int | None:
        """Ask a rank for its line in the cell, 0 outside the cell.

        Its signal handler writes its stack, the innermost call first. None if it does not answer:
        the cell may ignore the signal.
        """
        for _ in range(self._output.qsize()):
            self._output.get()
        self.processes.send_signal(rank, signal.SIGUSR1)
        end = time.monotonic() + ANSWER
        with suppress(queue.Empty):
            while (seconds := end - time.monotonic()) > 0:
                source, line = self._output.get(timeout=seconds)
                if source != rank or line is None:
                    continue
                if frame := re.search(rf'File "{name}", line (\d+) in ', line):
                    return int(frame[1])
                if "in _run_module_as_main" in line:  # the outermost call
                    return 0
        return None

    def run(self, cell: str, limit: float) -> None:
        """Run a cell on all ranks, and show the lines of each in a block.

        limit: seconds. Raises LaunchError if a rank fails or hangs. If not all ranks have completed
        the cell, all are ended, and the next cell starts new ones.
        """
        with one_interrupt():
            self._run(cell, limit)

    def _run(self, cell: str, limit: float) -> None:
        screen = Screen(sort=True)
        tracebacks: dict[int, str] = {}
        name = ""  # the cell's, as soon as the ranks have started
        death, delay = "", ""  # a rank that has ended; ranks that have not completed the cell
        error_type: type[LaunchError] = LaunchError
        try:
            if not self.cells:
                screen.wait_for_ranks(self.size)
                self._show_output(screen, LIMIT, tracebacks)
                screen.draw()
            self.cells += 1
            name = f"<cell {self.cells}>"
            self.busy, self.waiting = True, set(range(self.size))
            # After an empty line in place of the `%%ranks` line.
            self._send(json.dumps({"cell": f"\n{cell}", "name": name}))
            self._show_output(screen, limit, tracebacks)
        except TimeoutError:
            late = "" if tracebacks else f" after {limit if name else LIMIT:g} s"
            delay = f"not {'done' if name else 'started'}{late}:\n{self._positions(name, cell)}"
        except ChildProcessError as error:
            death = f"{error}\n"
        except KeyboardInterrupt:
            delay = self._positions(name, cell) or "no rank had begun the cell\n"
            error_type = Stopped
        finally:
            if self.busy:  # even if something else went wrong
                self.end()
            screen.draw()
        errors = [traceback.rstrip().rpartition("\n")[2] for traceback in tracebacks.values()]
        if sum(error.startswith("NameError: ") for error in errors) == self.size:
            error_type = UnknownName
        ending = f"all {self.size} {_ENDED}"
        # A rank that died is the cause of the rest.
        parts = [death and death + ending, _shared_tracebacks(tracebacks), delay and delay + ending]
        if any(parts):
            raise (error_type if name else Stopped)("\n".join(filter(None, parts)))


def _serve() -> None:
    """Run the cells that come on stdin; each rank calls it."""
    from ddp_helpers.rank.cells import serve  # here: it imports torch, which this process has not

    serve()


def _shared_tracebacks(tracebacks: dict[int, str]) -> str:
    """Return the traceback of each rank that failed, and equal ones only once."""
    ranks: dict[str, list[str]] = {}
    for rank, traceback in sorted(tracebacks.items()):
        lines = [shorten_paths(cut(line)) for line in traceback.rstrip().split("\n")]
        ranks.setdefault("\n".join(lines), []).append(str(rank))
    return "\n".join(f"rank {', '.join(at)}: {traceback}" for traceback, at in ranks.items())
