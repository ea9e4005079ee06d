"""Run a script on N ranks under a launcher, and show their output; `%%launch` does so with a cell.

It runs in the driver process. All processes that it starts have ended when it returns.
"""

import re
import tempfile
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from ddp_helpers import ROOT, own_folder
from ddp_helpers.launch.engine import LaunchError
from ddp_helpers.launch.launchers import (
    LINE_PATTERNS,
    LOOPBACK_ONLY,
    free_port,
    launch_commands,
    launch_environment,
)
from ddp_helpers.launch.processes import one_interrupt
from ddp_helpers.launch.programs import lines_of
from ddp_helpers.launch.screen import Screen, shorten_paths

__all__ = ["Launch", "LaunchError", "free_port", "load_ipython_extension", "run"]

# How launchers name the first rank that failed.
FIRST_FAILED = re.compile(
    r"Root Cause.*?rank\s*: (\d+)"  # torchrun
    r"|Process name: \[\S+[,@]\d+\]?,(\d+)\]"  # Open MPI 4 and 5, after an exit status
    r"|noticed that process rank (\d+)",  # Open MPI 4 and 5, after a signal
    re.S,
)
LAST_LINES = 8  # last lines of a failed rank that its error shows
TRACEBACK = "Traceback (most recent call last):"
# What fails while Python exits, a worker that torch ends for one, comes after why the rank failed.
IGNORED = re.compile(rf"^Exception ignored .*\n{re.escape(TRACEBACK)}\n(?: .*\n)*.*\n", re.M)


@dataclass
class Launch:
    """The output of a launch.

    lines: pairs of rank ("" for the launcher itself) and line; seconds: how long it took.
    """

    lines: list[tuple[str, str]]
    seconds: float

    def of(self, rank: int | str) -> list[str]:
        """Return the lines of one rank, or for "" the lines of the launcher."""
        return [line for source, line in self.lines if source == str(rank)]


def run(
    script: str | Path,
    *args: object,
    ranks: int | Sequence[int] = 1,
    launcher: str = "torchrun",
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Run a script on N ranks, and show their lines as they come.

    args: the script's arguments. ranks: the number of ranks, or one number for each of several
    simulated nodes on this machine, as in (2, 2). launcher: torchrun, mpirun, srun or python.
    timeout: seconds until all ranks are ended. env: more environment variables of the ranks. Raises
    LaunchError if a rank fails, the time is up, or the launcher is not on this machine.
    """
    per_node = [ranks] if isinstance(ranks, int) else list(ranks)
    launch = Launch([], 0.0)
    screen = Screen()
    screen.wait_for_ranks(sum(per_node), f" with {launcher}")
    network = {} if launcher == "srun" else LOOPBACK_ONLY  # srun's ranks may be on other machines
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as logs:
            start = launch_commands(launcher, [str(script), *map(str, args)], per_node, logs)
            variables = launch_environment(per_node, {**network, **(env or {})})
            lines = lines_of(start, variables, timeout, screen.refresh)
            statuses = _follow(lines, launcher, launch, screen)
    except FileNotFoundError as missing:
        raise LaunchError(str(missing)) from None
    except TimeoutError:
        late = f"not done after {timeout:g} s, so all its ranks were ended"
        raise LaunchError(failure_report(launch, late)) from None
    finally:
        screen.draw()
        launch.seconds = time.monotonic() - begin
    if any(statuses):
        failed = f"{launcher} ended with exit status {max(statuses, key=abs)}"
        raise LaunchError(failure_report(launch, failed))
    return launch


def _follow(
    lines: Generator[str | list[int], None, None],
    launcher: str,
    launch: Launch,
    screen: Screen,
) -> list[int]:
    """Keep and show the lines of a launcher until it ends; return its exit statuses."""
    with closing(lines):
        for line in lines:
            if isinstance(line, list):
                return line
            add_line(line, launcher, launch, screen)
    return []


def add_line(line: str, launcher: str, launch: Launch, screen: Screen) -> None:
    """Keep a line of a launcher, and show it if a rank has printed it."""
    match = re.fullmatch(LINE_PATTERNS[launcher], line)
    rank, text = match.groups() if match else ("", line)
    text = re.sub(r"^\[rank\d+\]: ?", "", text)  # torch's own prefix on a traceback
    launch.lines.append((rank, shorten_paths(text)))
    if match:
        screen.add(f"rank {rank}" if rank else "", text)


def failure_report(launch: Launch, reason: str) -> str:
    """Describe a failed launch: the reason, and the last lines of the rank that failed first.

    If the launcher does not name that rank, it is the rank that printed the last line.
    """
    rank = launch.lines[-1][0] if launch.lines else ""
    if first_failed := FIRST_FAILED.search("\n".join(launch.of(""))):
        rank = next(number for number in first_failed.groups() if number)
    source = f"rank {rank}" if rank else "the launcher"
    said = IGNORED.sub("", "".join(f"{line}\n" for line in launch.of(rank)))
    return f"{reason}; the last lines of {source}:\n" + "\n".join(_last_lines(said.splitlines()))


def _last_lines(lines: list[str]) -> list[str]:
    """Return the last LAST_LINES lines; for a longer traceback, also the lines before its start.

    Under mp.spawn the traceback comes from the parent process, after the rank's own lines.
    """
    begin = next((i for i, line in enumerate(lines) if line.startswith(TRACEBACK)), len(lines))
    cut = max(0, len(lines) - LAST_LINES)
    before = lines[max(0, begin - LAST_LINES) : begin] if begin < cut else []
    return [*before, *(["…"] if before else []), *lines[cut:]]


def launch_magic(line: str, cell: str) -> None:
    """Run this cell as a script: `%%launch 4`; on two nodes `%%launch 2 2`.

    `%%launch 2 fails` is for a cell that is meant to fail. Raises LaunchError, even if such a cell
    does not fail, and UsageError for a line that cannot be read.
    """
    options = line.split()
    ranks = [int(word) for word in options if word.isdecimal()]
    is_to_fail = "fails" in options
    if not ranks or 0 in ranks or set(options) - {*map(str, ranks), "fails"}:
        usage = "give a number of ranks, one for each node, and `fails` if it is meant to"
        raise UsageError(f"%%launch {line}: {usage}")
    path = own_folder(ROOT / "build" / "cells") / f"cell_{zlib.crc32(cell.encode()):08x}.py"
    path.write_text(cell)
    try:
        with one_interrupt():
            run(path, ranks=ranks)
    except KeyboardInterrupt:
        raise LaunchError("stopped: all ranks of this cell are ended") from None
    except LaunchError as error:
        if not is_to_fail:
            raise
        print(str(error).splitlines()[0].rstrip(":") + " are above")
    else:
        if is_to_fail:
            raise LaunchError("this cell was meant to fail, and did not")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register `%%launch`: `%load_ext ddp_helpers.launch.launch`."""
    register = shell.register_magic_function
    register(launch_magic, "cell", "launch")  # type: ignore[arg-type]  # IPython types it unbound
