"""Ranks that stay: `%%ranks 2` runs a cell on processes that are there, in one group, and keep its variables."""

import atexit
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from IPython.core.error import UsageError

from ddp_helpers.notebook.launch import LaunchError
from ddp_helpers.notebook.launchers import environment, free_port
from ddp_helpers.notebook.processes import MARK, guarded
from ddp_helpers.notebook.screen import Screen, tidy

LIMIT = 120.0  # seconds that a start or a cell may take, if the cell's first line says nothing else
GRACE = 2.0  # seconds that the others have when a rank has failed: they may wait for it in a collective


class Ranks:
    """So many processes of one group on this machine, which run cells and keep what these define."""

    def __init__(self, size: int) -> None:
        self.size, self.cells, self.mark = size, 0, uuid.uuid4().hex
        self.arrived: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self.guard = ExitStack()
        self.guard.enter_context(guarded(self.mark))
        shared = {MARK: self.mark, "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        env = environment([size], shared)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes |= {"text": True, "errors": "replace", "start_new_session": True}
        command = [sys.executable, "-m", "ddp_helpers.rank.cells"]
        self.processes = [
            subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
            for rank in range(size)
        ]
        for rank in range(size):
            threading.Thread(target=self.read, args=[rank], daemon=True).start()

    def read(self, rank: int) -> None:
        """Put each line of a rank into the queue, and None when it is gone; a thread a rank."""
        for line in self.processes[rank].stdout:
            self.arrived.put((rank, line.rstrip("\n")))
        self.arrived.put((rank, None))

    def end(self) -> None:
        """End all ranks, and what they have started."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.guard.close()

    def ask(self, cell: str) -> str:
        """Send a cell to all ranks; returns the name under which tracebacks show it."""
        self.cells += 1
        request = {"cell": f"\n{cell}", "name": f"<cell {self.cells}>"}  # below the line with %%ranks
        for process in self.processes:
            with suppress(BrokenPipeError):  # what ended it shows in its lines
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        return request["name"]

    def answers(self, screen: Screen, limit: float) -> dict[int, str]:
        """Show what the ranks say until all have run the cell; returns the traceback of each that failed.

        Raises TimeoutError with the ranks that are not done after `limit` seconds, or GRACE after another has failed,
        and ChildProcessError where one has ended.
        """
        failed, waiting, end = {}, set(range(self.size)), time.monotonic() + limit
        while waiting:
            try:
                rank, line = self.arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(waiting, failed) from None
            if line is None:
                status = self.processes[rank].wait()
                how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                raise ChildProcessError(f"rank {rank} has ended, by {how}")
            said, mark, answer = line.partition(self.mark)
            if said or not mark:
                screen.add(f"rank {rank}", said)
            if mark:
                waiting.discard(rank)
            if mark and (trace := json.loads(answer)):
                failed[rank], end = trace, min(end, time.monotonic() + GRACE)
        return failed

    def places(self, ranks: Iterable[int], name: str, cell: str) -> str:
        """Say in which line of the cell each of these ranks stands, a line of text for those in one place."""
        found: dict[str, list[str]] = {}
        for rank in sorted(ranks):
            number = self.line(rank, name)
            code = cell.splitlines()[number - 2].partition("#")[0].strip() if number else ""
            found.setdefault(f"in line {number}, `{code}`" if number else "outside of the cell", []).append(str(rank))
        return "".join(f"rank {', '.join(who)} {place}\n" for place, who in found.items())

    def line(self, rank: int, name: str) -> int:
        """Ask a rank for its line in the cell, or 0: its signal handler writes its stack, innermost frame first."""
        self.processes[rank].send_signal(signal.SIGUSR1)
        with suppress(queue.Empty):
            while True:
                who, said = self.arrived.get(timeout=1)
                if who == rank and (match := re.search(rf'File "{name}", line (\d+)', said or "")):
                    return int(match[1])
        return 0

    def run(self, cell: str, limit: float) -> None:
        """Run a cell on all ranks, and show each one's lines in a block; raises LaunchError if a rank fails or hangs.

        Where not all have run it to its end, all are ended, and the next cell starts new ones.
        """
        screen, name, failed = Screen(sort=True), "", {}
        try:
            if not self.cells:
                screen.wait(f"starting {self.size} {'rank' if self.size == 1 else 'ranks'} …")
                self.answers(screen, LIMIT)
            name = self.ask(cell)
            failed = self.answers(screen, limit)
            why = ""
        except TimeoutError as late:
            waiting, failed = late.args
            why = f"not done{'' if failed else f' after {limit:g} s'}:\n{self.places(waiting, name, cell)}"
        except ChildProcessError as dead:
            why = f"{dead}\n"
        except KeyboardInterrupt:
            why = f"stopped:\n{self.places(range(self.size), name, cell)}"
        finally:
            screen.draw()
        if why:
            self.end()
            why += f"all {self.size} ranks were ended, with their variables: the next cell starts new ones"
        if why or failed:
            raise LaunchError(told(failed) + why)


def told(failed: dict[int, str]) -> str:
    """The traceback of each rank that failed; one that several share only once."""
    by_trace: dict[str, list[str]] = {}
    for rank, trace in sorted(failed.items()):
        by_trace.setdefault(tidy(trace), []).append(str(rank))
    return "".join(f"rank {', '.join(who)}: {trace}" for trace, who in by_trace.items())


_ranks: Ranks | None = None


def end() -> None:
    """End the ranks that stay, if there are any; the kernel calls it at its end."""
    global _ranks
    if _ranks:
        _ranks.end()
    _ranks = None


def there(size: int) -> Ranks:
    """The ranks that are there, or new ones if there are none, or not as many."""
    global _ranks
    if _ranks and (_ranks.size != size or any(process.poll() is not None for process in _ranks.processes)):
        end()
    _ranks = _ranks or Ranks(size)
    return _ranks


def start(size: int, **variables: object) -> None:
    """Start so many ranks, if they are not there, and give all of them variables: numbers, strings, lists of them."""
    there(size).run(f"globals().update(__import__('json').loads({json.dumps(variables)!r}))", LIMIT)


def pull(name: str) -> list:
    """Fetch a variable from each rank: its value on rank 0, on rank 1, and so on; tensors and plain values alone.

    Raises LaunchError if there are no ranks, or the name means nothing there.
    """
    import torch  # here: a notebook that starts no ranks needs none of it

    if not _ranks:
        raise LaunchError(f"pull({name!r}): no ranks are there: run a `%%ranks` cell first")
    with tempfile.TemporaryDirectory() as folder:
        _ranks.run(f"__import__('torch').save({name}, {folder + '/'!r} + __import__('os').environ['RANK'])", LIMIT)
        paths = [Path(folder) / str(rank) for rank in range(_ranks.size)]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]


def magic(line: str, cell: str) -> None:
    """Run this cell on ranks that stay: `%%ranks 2`, `%%ranks 2 here`, `%%ranks 2 limit=10 fails`."""
    match = re.fullmatch(r"(?P<size>[1-9]\d?)(?P<here> here)?( limit=(?P<limit>\d+(\.\d+)?))?(?P<fails> fails)?", line)
    if not match:
        usage = "`here` to run it in this kernel too, and `fails` if it is meant to"
        raise UsageError(f"%%ranks {line}: give a number of ranks; seconds as in `limit=10`, {usage}")
    if match["here"]:
        from IPython import get_ipython

        get_ipython().run_cell(cell).raise_error()
    try:
        there(int(match["size"])).run(cell, float(match["limit"] or LIMIT))
    except LaunchError as error:
        if not match["fails"]:
            raise
        print(str(error).rstrip())
    else:
        if match["fails"]:
            raise LaunchError("this cell was meant to fail, and did not")


def load_ipython_extension(shell) -> None:
    """Make `%%ranks` known: `%load_ext ddp_helpers.notebook.ranks`."""
    shell.register_magic_function(magic, "cell", "ranks")
    atexit.register(end)
