"""Run a script on N ranks from a notebook, and the `%%launch` magic that does so with a cell."""

import re
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from IPython.core.error import UsageError

from ddp_helpers import ROOT, PlainError
from ddp_helpers.launch.launchers import HERE, MARKS, commands, environment, free_port
from ddp_helpers.launch.processes import lines_of, one_interrupt
from ddp_helpers.launch.screen import Screen, tidy

__all__ = ["Launch", "LaunchError", "free_port", "load_ipython_extension", "run"]


class LaunchError(PlainError, RuntimeError):
    """A launch that failed or took too long; the message names the rank and holds its last lines."""


@dataclass
class Launch:
    """The output of a launch: pairs of rank ('' for the launcher itself) and line, and the seconds it took."""

    lines: list[tuple[str, str]]
    seconds: float

    def of(self, rank: int | str) -> list[str]:
        """The lines of one rank."""
        return [line for who, line in self.lines if who == str(rank)]


def run(
    script: str | Path,
    *args: object,
    ranks: int | Sequence[int] = 1,
    launcher: str = "torchrun",
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Run a script on so many ranks, and show their lines as they come; the learner's process calls it.

    ranks: how many, or how many on each of several node groups on this machine, as in (2, 2).
    timeout: seconds until all ranks are ended. Raises LaunchError if a rank fails or the time is up.
    """
    per_node = [ranks] if isinstance(ranks, int) else list(ranks)
    screen, begin, launch = Screen(), time.monotonic(), Launch([], 0.0)
    statuses: list[int] = []
    screen.wait(f"starting {sum(per_node)} {'rank' if sum(per_node) == 1 else 'ranks'} with {launcher} …")
    with tempfile.TemporaryDirectory() as logs:
        try:
            start = commands(launcher, [str(script), *map(str, args)], per_node, logs)
            here = {} if launcher == "srun" else HERE  # its ranks may be on other machines
            env = environment(per_node, here | dict(env or {}))
            with closing(lines_of(start, env, timeout, screen.refresh)) as lines:
                for line in lines:
                    if isinstance(line, list):
                        statuses = line
                    else:
                        take(line, launcher, launch, screen)
        except FileNotFoundError as missing:
            raise LaunchError(str(missing)) from None
        except TimeoutError:
            raise LaunchError(report(launch, f"not done after {timeout:g} s, so all its ranks were ended")) from None
        finally:
            screen.draw()
            launch.seconds = time.monotonic() - begin
    if any(statuses):
        raise LaunchError(report(launch, f"{launcher} ended with exit status {max(statuses, key=abs)}"))
    return launch


def take(line: str, launcher: str, launch: Launch, screen: Screen) -> None:
    """Keep a line, and show it if a rank said it."""
    rank, text = match.groups() if (match := re.fullmatch(MARKS[launcher], line)) else ("", line)
    text = re.sub(r"^\[rank\d+\]: ?", "", text)  # torch's own mark on a traceback
    launch.lines.append((rank, tidy(text)))
    if match:
        screen.add(f"rank {rank}" if rank else "", text)


# How launchers name the first rank that failed: torchrun; Open MPI 4 and 5, after an exit status, and after a signal.
FIRST_FAILED = re.compile(
    r"Root Cause.*?rank\s*: (\d+)|Process name: \[\S+[,@]\d+\]?,(\d+)\]|noticed that process rank (\d+)", re.S
)


def report(launch: Launch, what: str) -> str:
    """Describe a failed launch: the first rank that failed, where the launcher names it, and its last lines."""
    first = FIRST_FAILED.search("\n".join(line for who, line in launch.lines if not who))
    who = first[first.lastindex] if first else (launch.lines[-1][0] if launch.lines else "")
    last = launch.of(who)[-8:]
    return f"{what}; the last lines of {f'rank {who}' if who else 'the launcher'}:\n" + "\n".join(last)


def launch_magic(line: str, cell: str) -> None:
    """Run this cell as a script: `%%launch 4`, on two nodes `%%launch 2 2`, and meant to fail `%%launch 2 fails`."""
    numbers = [int(word) for word in line.split() if word.isdecimal()]
    if not numbers or 0 in numbers or set(line.split()) - {*map(str, numbers), "fails"}:
        raise UsageError(f"%%launch {line}: give a number of ranks, one for each node, and `fails` if it is meant to")
    path = ROOT / "build" / "cells" / f"cell_{zlib.crc32(cell.encode()):08x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cell)
    try:
        with one_interrupt():
            run(path, ranks=numbers)
    except KeyboardInterrupt:
        raise LaunchError("stopped: all ranks of this cell are ended") from None
    except LaunchError as error:
        if "fails" not in line.split():
            raise
        print(str(error).splitlines()[0].rstrip(":") + " are above")
    else:
        if "fails" in line.split():
            raise LaunchError("this cell was meant to fail, and did not")


def load_ipython_extension(shell) -> None:
    """Make `%%launch` known: `%load_ext ddp_helpers.launch.launch`."""
    shell.register_magic_function(launch_magic, "cell", "launch")
