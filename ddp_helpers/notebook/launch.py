"""Run a script on N ranks from a notebook, and the `%%ranks` magic that does so with a cell."""

import os
import re
import shutil
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.notebook.processes import TimeLimit, lines_of
from ddp_helpers.notebook.screen import Screen, tidy

# How each launcher marks a rank's line; what bears no mark is the launcher's own talk.
MARKS = {
    "torchrun": r"\[rank(\d+)\]:(.*)",
    "mpirun": r"\[\d+,(\d+)\]<\w+>:(.*)",
    "srun": r" *(\d+): (.*)",
    "python": r"()(.*)",
}
# What ranks must not inherit: the rank that this process may itself have.
OURS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|OMPI_|PMIX_")


class LaunchError(RuntimeError):
    """A launch that failed or took too long; the message names the rank and holds its last lines."""


@dataclass
class Launch:
    """What a launch printed, as (rank, or '' for the launcher itself; line), and how many seconds it took."""

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
    with tempfile.TemporaryDirectory() as logs:
        start = commands(launcher, [str(script), *map(str, args)], per_node, logs)
        try:
            with closing(lines_of(start, environment(sum(per_node), env or {}), timeout)) as lines:
                for line in lines:
                    if isinstance(line, list):
                        statuses = line
                    else:
                        take(line, launcher, launch, screen)
        except TimeLimit:
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
    launch.lines.append((rank, tidy(text)))
    if match:
        screen.add(f"rank {rank}" if rank else "", text)


def report(launch: Launch, what: str) -> str:
    """What went wrong: the first rank that failed, where the launcher says it, and its last lines."""
    said = "\n".join(line for who, line in launch.lines if not who)
    first = re.search(r"Root Cause.*?rank\s*: (\d+)", said, re.S) or re.search(
        r"Process name: \[\[\d+,\d+\],(\d+)\]", said
    )
    who = first[1] if first else (launch.lines[-1][0] if launch.lines else "")
    last = launch.of(who)[-8:]
    return f"{what}; the last lines of {f'rank {who}' if who else 'the launcher'}:\n" + "\n".join(last)


def commands(launcher: str, program: list[str], per_node: Sequence[int], logs: str) -> list[list[str]]:
    """The command lines that start the ranks: one, or with torchrun one for each node."""
    ranks = sum(per_node)
    if launcher != "python" and launcher != "torchrun" and not shutil.which(launcher):
        raise LaunchError(f"{launcher} is not on this machine: install it, or use launcher='torchrun'")
    if launcher == "mpirun":
        return [
            [
                "mpirun",
                "--oversubscribe",
                "--bind-to",
                "none",
                "--tag-output",
                "-n",
                str(ranks),
                sys.executable,
                *program,
            ]
        ]
    if launcher == "srun":
        return [["srun", "--label", f"--ntasks={ranks}", sys.executable, *program]]
    if launcher == "python":
        return [[sys.executable, *program]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--role=rank", "--tee=3", f"--log-dir={logs}"]
    if len(per_node) == 1:
        return [[*torchrun, "--standalone", f"--nproc-per-node={ranks}", *program]]
    meet = [f"--nnodes={len(per_node)}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [[*torchrun, *meet, f"--node-rank={i}", f"--nproc-per-node={n}", *program] for i, n in enumerate(per_node)]


def free_port() -> int:
    """A port that is free now; another program can take it before its use, so ask late."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks: ours without a rank of our own, unbuffered, and the CPUs shared out."""
    env = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, cpus // ranks))}
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]:"
    if os.geteuid() == 0:  # as in a container; mpirun refuses root otherwise
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env | dict(extra)


def ranks_magic(line: str, cell: str) -> None:
    """Run this cell as a script: `%%ranks 4`, on two nodes `%%ranks 2 2`, and meant to fail `%%ranks 2 fails`."""
    numbers = [int(word) for word in line.split() if word.isdigit()]
    path = ROOT / "build" / "cells" / f"cell_{zlib.crc32(cell.encode()):08x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(cell)
    try:
        run(path, ranks=numbers, timeout=120)
    except LaunchError as error:
        if "fails" not in line.split():
            raise
        print(error)
    else:
        if "fails" in line.split():
            raise LaunchError("this cell was meant to fail, and did not")


def load_ipython_extension(shell) -> None:
    """Make `%%ranks` known: `%load_ext ddp_helpers.notebook.launch`."""
    shell.register_magic_function(ranks_magic, "cell", "ranks")
