"""The `%%clinic` magic of notebook 10: run one script with its fault and with its cure, and show what both say."""

import multiprocessing
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from IPython.core.error import UsageError

from ddp_helpers import ROOT
from ddp_helpers.notebook.launch import LaunchError
from ddp_helpers.notebook.launchers import environment, free_port
from ddp_helpers.notebook.processes import ended
from ddp_helpers.notebook.screen import coloured, tidy

LIMIT = 90.0  # seconds for a run that is not meant to hang
GRACE = 4.0  # seconds that the others have when a rank has failed; then they get SIGTERM, as from torchrun
# A server that has torch forks each rank, in a tenth of a second; a new Python would import torch for seconds.
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload([__name__, "torch.distributed", "torch._dynamo"])  # DDP's first call imports the last
# What stands around a cell: the same few lines in most scripts. They go before it as one line, in the place of the
# magic's own, so that the line numbers of errors are those of the cell.
IMPORTS = [
    "import faulthandler, os, signal, time",
    "from datetime import timedelta",
    "import torch, torch.distributed as dist",
    "from torch import nn",
    "from torch.nn.parallel import DistributedDataParallel as DDP",
]
JOIN, LEAVE = (
    ['dist.init_process_group("gloo")', "rank = dist.get_rank()"],
    ["dist.barrier()", "dist.destroy_process_group()"],
)
FRAME = "\n".join([*IMPORTS, "", *JOIN, "# the cell stands here", *LEAVE])
LINE = r"\s*([1-9]\d?)\s+(fails|aborts|lies|hangs\s+limit=(\d+))(\s+bare)?((?:\s+[A-Z_]+=\S+)*)\s*"
WIDTH, MOST = 240, 7  # letters of a line, and lines of a rank, that are shown
# What tells nothing: the frames of Python and of C++, and what stands around them.
NOISE = re.compile(
    r"\s(?! what)|$|Traceback|frame #|<omitting|Exception raised|Thread 0x|The above|During|terminate c"
    r"|\S+ UserWarning: (Detected an existing|torch\.distributed is) "  # DCP's
)
STACK = re.compile(r' *File "(?P<file>[^"]*)", line (?P<line>\d+) in ')  # as faulthandler writes it
STAMP = re.compile(r"\[[WE]\d+ [\d:.]+ \S+\] (\[c10d\] )?|\S+\.py:\d+: |^\[rank\d+\]: ?")  # when and where it was said
SOURCE = re.compile(r"\[(enforce fail at )?/\S*/gloo/(\S+\.cc:\d+)\]")  # where gloo was built, which is long


def be_rank(script: Path, folder: str, log: Path, env: Mapping[str, str]) -> None:
    """Be one rank, in a process that has torch already: run the script in this folder, with its output in a log."""
    import torch.distributed as dist

    os.setsid()  # a process group of its own, by which what it starts is found
    signal.alarm(int(2 * LIMIT))  # also where the notebook is gone
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    dist.set_debug_level_from_env()
    dist.torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


class Run:
    """Ranks that run one script, each a process of its own. It is told to each where to meet, as `srun` would."""

    def __init__(self, script: Path, size: int, limit: float = LIMIT, extra: Mapping[str, str] | None = None) -> None:
        """Start the ranks. limit: seconds until all are ended, from when each rank has said something."""
        self.limit, self.begin = limit, time.monotonic()
        self.until, self.ends = self.begin + LIMIT, [None] * size  # exit statuses: below 0 for a signal
        self.files = tempfile.TemporaryDirectory()
        folder, self.logs = Path(self.files.name), [Path(self.files.name, f"rank{rank}") for rank in range(size)]
        (folder / "work").mkdir()
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        # Without GPUs, so that the messages are the same on every machine.
        env, self.ranks = environment([size], meet | {"CUDA_VISIBLE_DEVICES": "", **(extra or {})}), []
        for rank, log in enumerate(self.logs):
            log.touch()
            given = script, str(folder / "work"), log, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.ranks.append(START.Process(target=be_rank, args=given))
            self.ranks[-1].start()

    def over(self) -> bool:
        """Whether all ranks have ended. Those whose time is up are ended here; their status is None if none failed."""
        now, self.ends = time.monotonic(), [rank.exitcode for rank in self.ranks]
        failed = any(self.ends)
        if failed:
            self.until = min(self.until, now + GRACE)
        elif all(log.stat().st_size for log in self.logs):
            self.until = min(self.until, now + self.limit)
        if None in self.ends and now < self.until:
            return False
        self.end(signal.SIGTERM if failed else signal.SIGKILL)
        if failed:
            self.ends = [rank.exitcode for rank in self.ranks]
        self.seconds = time.monotonic() - self.begin
        return True

    def end(self, number: int = signal.SIGKILL) -> None:
        """End all ranks, and what they have started."""
        for last in (number, signal.SIGKILL):
            for rank in self.ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, last)
            for rank in self.ranks:
                rank.join(5)

    def said(self, rank: int) -> list[str]:
        """The lines of a rank."""
        return tidy(self.logs[rank].read_text(errors="replace")).splitlines()

    def went(self, how: str) -> bool:
        """Whether it ended as it was meant to."""
        stays, killed = None in self.ends, min(status or 0 for status in self.ends if status != -signal.SIGTERM) < 0
        return {"hangs": stays, "lies": not stays and not any(self.ends), "aborts": killed}.get(how, any(self.ends))


def attend(*runs: Run) -> None:
    """Wait until these runs have ended; an interrupt ends them all. The learner's process calls it."""
    waiting = list(runs)
    try:
        while waiting := [run for run in waiting if not run.over()]:
            time.sleep(0.05)
    finally:
        for run in waiting:
            run.end()


def telling(lines: list[str]) -> list[str]:
    """The lines of a rank that say what it did, or what went wrong; of several alike, one."""
    kept = []
    for line in lines:
        if found := STACK.match(line):
            if "/build/cells/" in found["file"]:
                kept.append(f"in line {found['line']} of the cell")
        elif not NOISE.match(line):
            kept.append(SOURCE.sub(r"[\1gloo/\2]", STAMP.sub("", line)).strip())
    return [line if len(line) <= WIDTH else f"{line[:WIDTH]} …" for line in dict.fromkeys(kept)][-MOST:]


def show(label: str, run: Run) -> None:
    """Print how each rank ended, and its telling lines."""
    ends = ", ".join(f"rank {rank} {ended(status)}" for rank, status in enumerate(run.ends))
    print(f"{label}: {ends}; {run.seconds:.0f} s")
    for rank in range(len(run.ends)):
        for line in telling(run.said(rank)):
            print(" ", coloured(f"rank {rank}", line))


def clinic_magic(line: str, cell: str) -> None:
    """Run this cell twice at once, with CURED = False and True: `%%clinic 2 fails`, aborts, lies, hangs limit=8.

    The ranks form a group first and leave it at last, unless the line says `bare`. NAME=value behind it is for the
    environment. Raises LaunchError if the broken run does not end as said, or if the cured one fails.
    """
    found = re.fullmatch(LINE, line)
    if not found:
        raise UsageError(f"%%clinic {line}: give the ranks, then fails, aborts, lies or hangs limit=SECONDS")
    size, how, extra = int(found[1]), found[2].split()[0], dict(word.split("=", 1) for word in found[5].split())
    scripts = [written(cell, not found[4], cured) for cured in (False, True)]
    broken, cured = Run(scripts[0], size, float(found[3] or LIMIT), extra), Run(scripts[1], size, LIMIT, extra)
    attend(broken, cured)
    show("broken", broken)
    show("cured", cured)
    if not broken.went(how):
        raise LaunchError(f"the broken run was to be one that {how}, but: {', '.join(map(ended, broken.ends))}")
    if cured.ends != [0] * size:
        raise LaunchError(f"the cured run is not cured: {', '.join(map(ended, cured.ends))}")


def written(cell: str, framed: bool, cured: bool) -> Path:
    """The cell as a script, in which CURED is known."""
    join, leave = (JOIN, LEAVE) if framed else ([], [])
    text = "\n".join(["; ".join([f"CURED = {cured}", *IMPORTS, *join]), cell.rstrip("\n"), *leave, ""])
    path = ROOT / "build" / "cells" / f"clinic_{zlib.crc32(text.encode()):08x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load_ipython_extension(shell) -> None:
    """Make `%%clinic` known, for %load_ext, and start the server: it imports torch while the reader reads."""
    multiprocessing.forkserver.ensure_running()
    shell.register_magic_function(clinic_magic, "cell", "clinic")
