"""Ranks that stay: `%%ranks 2` runs a cell on processes that are there, in one group, and keep its variables."""

import atexit
import io
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
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from IPython.core.error import UsageError

from ddp_helpers.launch.launch import LaunchError
from ddp_helpers.launch.launchers import HERE, environment, free_port
from ddp_helpers.launch.processes import ended, no_interrupt, one_interrupt, started
from ddp_helpers.launch.screen import WIDEST, Screen, cut, tidy

LIMIT = 120.0  # seconds that a start or a cell may take, if the cell's first line says nothing else
ANSWER = 10.0  # seconds that a rank has to say where it stands, or to end when it has closed its output
GRACE = 2.0  # seconds that the others have when a rank has failed: they may wait for it in a collective
MOST, LETTERS = 1000, 200_000  # lines, and characters, of a rank that are shown of a cell


class Stopped(LaunchError):
    """A cell that was interrupted, or whose ranks did not start: no `fails` makes that right."""


class Ranks:
    """So many processes of one group on this machine, which run cells and keep what these define."""

    def __init__(self, size: int) -> None:
        self.size, self.cells = size, 0
        self.busy, self.waiting = True, set(range(size))  # until the start, and then each cell, is over on all ranks
        self.mark = uuid.uuid4().hex  # ends a cell's output: nobody else has it
        self.arrived: queue.Queue[tuple[int, str | None]] = queue.Queue(MOST)  # who prints more than is read, waits
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = environment([size], HERE | shared)
        command = [sys.executable, "-m", "ddp_helpers.rank.cells"]
        environments = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        self.threads: list[threading.Thread] = []
        self.started = ExitStack()  # closed, it ends the processes
        # By SIGKILL at once: a cell may have made SIGTERM do anything.
        self.processes = self.started.enter_context(
            started([command] * size, environments, stdin=subprocess.PIPE, first=signal.SIGKILL)
        )
        try:
            for rank in range(size):
                self.threads.append(threading.Thread(target=self.read, args=[rank], daemon=True))
                self.threads[rank].start()
            self.send(self.mark)
        except BaseException:
            self.end()
            raise

    def read(self, rank: int) -> None:
        """Put each line of a rank into the queue, and None when it is gone; a thread a rank."""
        for line in io.TextIOWrapper(self.processes[rank].stdout, errors="replace", newline="\n"):
            self.arrived.put((rank, line.rstrip("\r\n").rpartition("\r")[2]))  # the last state of a bar drawn anew
        self.arrived.put((rank, None))

    def send(self, line: str) -> None:
        """Write a line to all ranks."""
        for process in self.processes:
            with suppress(BrokenPipeError):  # what ended it shows in its lines
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()

    def alive(self) -> bool:
        """Say whether every process is still there."""
        return all(process.poll() is None for process in self.processes)

    def end(self) -> None:
        """End all ranks, and what they have started; an interrupt changes nothing."""
        with no_interrupt():
            self.started.close()
            end = time.monotonic() + 1
            while any(thread.is_alive() for thread in self.threads) and time.monotonic() < end:
                with suppress(queue.Empty):  # let them come to the end of their pipes
                    self.arrived.get(timeout=0.01)

    def answers(self, screen: Screen, limit: float, failed: dict[int, str]) -> None:
        """Show what the ranks say until all have run the cell, and keep in `failed` the traceback of each that failed.

        Raises TimeoutError where ranks are not done after `limit` seconds, or GRACE after another has failed, and
        ChildProcessError where one has ended.
        """
        self.busy, self.waiting, end = True, set(range(self.size)), time.monotonic() + limit
        lines, letters, hidden = Counter(), Counter(), Counter()  # of each rank
        while self.waiting:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            try:
                rank, line = self.arrived.get(timeout=min(left, 0.2))
            except queue.Empty:
                screen.refresh()
                for rank in self.waiting:  # its child may hold the pipe open
                    if self.processes[rank].poll() is not None:
                        raise ChildProcessError(self.ended(rank)) from None
                continue
            if line is None:
                raise ChildProcessError(self.ended(rank))
            text, mark, answer = line.partition(self.mark)
            if text or not mark:
                if lines[rank] == MOST or letters[rank] > LETTERS:
                    hidden[rank] += 1
                else:
                    screen.add(f"rank {rank}", text)
                    lines[rank] += 1
                    letters[rank] += min(len(text), WIDEST)
            if mark:
                self.waiting.discard(rank)
                if hidden[rank]:
                    screen.add(f"rank {rank}", f"… and {hidden[rank]} more lines")
            if mark and (trace := json.loads(answer)):
                failed[rank], end = trace, min(end, time.monotonic() + GRACE)
        self.busy = False

    def ended(self, rank: int) -> str:
        """Say how a rank has ended."""
        try:
            status = self.processes[rank].wait(timeout=ANSWER)
        except subprocess.TimeoutExpired:
            return f"rank {rank} has closed its output"
        return f"rank {rank} is gone: {ended(status)}"

    def places(self, name: str, cell: str) -> str:
        """Say in which line of the cell each waiting rank stands, a line of text for those in one place."""
        found: dict[str, list[str]] = {}
        for rank in sorted(self.waiting) if name else ():
            number = self.line(rank, name)
            if number:
                place = f"in line {number}, `{cell.split(chr(10))[number - 2].strip()}`"
            else:
                place = "does not say where it is" if number is None else "outside of the cell"
            found.setdefault(place, []).append(str(rank))
        return "".join(f"rank {', '.join(who)} {place}\n" for place, who in found.items())

    def line(self, rank: int, name: str) -> int | None:
        """Ask a rank for its line in the cell, 0 outside of it: its signal handler writes its stack, innermost first.

        None where nothing comes: the cell may ignore the signal.
        """
        for _ in range(self.arrived.qsize()):
            self.arrived.get()
        self.processes[rank].send_signal(signal.SIGUSR1)
        end = time.monotonic() + ANSWER
        with suppress(queue.Empty):
            while (left := end - time.monotonic()) > 0:
                who, said = self.arrived.get(timeout=left)
                if who == rank and (match := re.search(rf'File "{name}", line (\d+) in ', said or "")):
                    return int(match[1])
                if who == rank and "in _run_module_as_main" in (said or ""):  # the outermost
                    return 0
        return None

    @one_interrupt()
    def run(self, cell: str, limit: float) -> None:
        """Run a cell on all ranks, and show each one's lines in a block; raises LaunchError if a rank fails or hangs.

        Where not all have run it to its end, all are ended, and the next cell starts new ones.
        """
        screen, name, failed, why, dead, kind = Screen(sort=True), "", {}, "", "", LaunchError
        try:
            if not self.cells:
                screen.wait(f"starting {self.size} {'rank' if self.size == 1 else 'ranks'} …")
                self.answers(screen, LIMIT, failed)
                screen.draw()
            self.cells += 1
            name = f"<cell {self.cells}>"
            self.send(json.dumps({"cell": f"\n{cell}", "name": name}))  # below its line with %%ranks
            self.answers(screen, limit, failed)
        except TimeoutError:
            late = "" if failed else f" after {limit if name else LIMIT:g} s"
            why = f"not {'done' if name else 'started'}{late}:\n{self.places(name, cell)}"
        except ChildProcessError as error:
            dead = f"{error}\n"
        except KeyboardInterrupt:
            why, kind = f"stopped:\n{self.places(name, cell)}", Stopped
        finally:
            if self.busy:  # also where something else went wrong
                self.end()
            screen.draw()
        anew = f"all {self.size} ranks were ended, with their variables: the next cell starts new ones"
        said = [dead and dead + anew, told(failed), why and why + anew]  # a rank that died is the cause of the rest
        if any(said):
            raise (kind if name else Stopped)("\n".join(filter(None, said)))


def told(failed: dict[int, str]) -> str:
    """The traceback of each rank that failed; one that several share only once."""
    by_trace: dict[str, list[str]] = {}
    for rank, trace in sorted(failed.items()):
        lines = [tidy(cut(line)) for line in trace.rstrip().split("\n")]
        by_trace.setdefault("\n".join(lines), []).append(str(rank))
    return "\n".join(f"rank {', '.join(who)}: {trace}" for trace, who in by_trace.items())


_ranks: Ranks | None = None


def end() -> None:
    """End the ranks that stay, if there are any; the kernel calls it at its end."""
    global _ranks
    if _ranks:
        _ranks.end()
    _ranks = None


def there(size: int) -> Ranks:
    """The ranks that are there, or new ones if there are none, or not as many, or one has ended."""
    global _ranks
    if _ranks and not _ranks.busy and not _ranks.alive():
        print("a rank has ended since the last cell: these are new ones, without its variables")
    if _ranks and (_ranks.size != size or _ranks.busy or not _ranks.alive()):
        end()
    _ranks = _ranks or Ranks(size)
    return _ranks


def start(size: int, /, **variables: object) -> None:
    """Start so many ranks, if they are not there, and give all of them variables: numbers, strings, lists of them."""
    given = json.dumps(variables)
    there(size).run(f"globals().update(__import__('json').loads({given!r}))", LIMIT)


def pull(name: str) -> list:
    """Fetch a variable from each rank: its value on rank 0, on rank 1, and so on; tensors and plain values alone.

    Raises LaunchError if there are no ranks, or the name means nothing there.
    """
    import torch  # here: a notebook that starts no ranks needs none of it

    if not _ranks or _ranks.busy or not _ranks.alive():
        raise LaunchError(f"pull({name!r}): no ranks are there: run the cells from the first with `%%ranks` on")
    with tempfile.TemporaryDirectory() as folder:
        _ranks.run(f"__import__('torch').save({name}, {folder + '/'!r} + __import__('os').environ['RANK'])", LIMIT)
        paths = [Path(folder) / str(rank) for rank in range(_ranks.size)]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]


def magic(line: str, cell: str) -> None:
    """Run this cell on ranks that stay: `%%ranks 2`, `%%ranks 2 here`, `%%ranks 2 limit=10 fails`."""
    words = r"(?P<size>[1-9]\d?)(?P<here> here)?( limit=(?P<limit>\d+(\.\d+)?))?(?P<fails> fails)?"
    match = re.fullmatch(words, line.strip())
    if not match or (match["limit"] and not float(match["limit"])):
        usage = "`here` to run it in this kernel too, and `fails` if it is meant to"
        raise UsageError(f"%%ranks {line}: give a number of ranks; seconds above 0 as in `limit=10`, {usage}")
    try:
        compile(cell, "cell", "exec")
    except SyntaxError as error:
        why = f"line {(error.lineno or 0) + 1}: {error.msg}"
        raise UsageError(f"%%ranks: {why}: only Python runs on ranks, no `!` and no `%`") from None
    if match["here"]:
        from IPython import get_ipython

        if not get_ipython().run_cell(cell).success:
            raise LaunchError("this kernel's part failed, above: no rank has run the cell")
    try:
        there(int(match["size"])).run(cell, float(match["limit"] or LIMIT))
    except LaunchError as error:
        if isinstance(error, Stopped) or not match["fails"]:
            raise
        print(error)
    else:
        if match["fails"]:
            raise LaunchError("this cell was meant to fail, and did not")


def load_ipython_extension(shell) -> None:
    """Make `%%ranks` known: `%load_ext ddp_helpers.launch.ranks`."""
    shell.register_magic_function(magic, "cell", "ranks")
    atexit.register(end)
