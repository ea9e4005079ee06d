"""Run a script on ranks that a server with torch forks, each in a tenth of a second, and keep what they say and do."""

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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil

from ddp_helpers.launch.launchers import HERE, environment, free_port
from ddp_helpers.launch.processes import MARK, end_all, ended, no_interrupt
from ddp_helpers.launch.screen import tidy

if TYPE_CHECKING:
    from ddp_helpers.rank.watch import RankNotes

LIMIT = 90.0  # seconds for a run that is not meant to hang
GRACE = 4.0  # seconds that the others have when a rank has failed; then they get SIGTERM, as from torchrun
# A new Python would import torch for seconds.
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload([__name__, "torchvision.datasets", "torch._dynamo"])  # DDP imports the last
CLOSE = 1e-4  # weights that differ by less are equal, to the rounding of some steps in float32
WIDTH, MOST = 240, 7  # letters of a line, and lines of a rank, that are shown
# What tells nothing: the frames of Python and of C++, and what stands around them.
NOISE = re.compile(
    r"\s(?! what)|$|Traceback|frame #|<omitting|Exception raised|Thread 0x|The above|During|terminate c"
    r"|\S+ UserWarning: (Detected an existing|torch\.distributed is) "  # DCP's
)
STACK = re.compile(r' *File "(?P<file>[^"]*)", line (?P<line>\d+) in ')  # as faulthandler writes it
STAMP = re.compile(r"\[[WE]\d+ [\d:.]+ \S+\] (\[c10d\] )?|\S+\.py:\d+: |^\[rank\d+\]: ?")  # when and where it was said
SOURCE = re.compile(r"\[(enforce fail at )?/\S*/gloo/(\S+\.cc:\d+)\]")  # where gloo was built, which is long


def be_rank(words: list[str], folder: str, log: Path, env: Mapping[str, str], watched: bool) -> None:
    """Be one rank, in a process that has torch already: run the script in this folder, with its output in a log."""
    import torch.distributed as dist

    from ddp_helpers.rank.meeting import listen_narrowly
    from ddp_helpers.rank.watch import ScriptWatcher

    os.setsid()  # a process group of its own, by which what it starts is found
    signal.alarm(int(2 * LIMIT))  # also where the notebook is gone
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv, sys.path[:0] = words, [str(Path(words[0]).parent)]
    dist.set_debug_level_from_env()
    dist.torch.set_num_threads(1)
    listen_narrowly()
    watcher = ScriptWatcher() if watched else None
    if watcher:
        watcher.start()
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    if watcher:
        watcher.write(f"rank{env['RANK']}.notes")


def has_group(number: int) -> bool:
    """Say whether a process of this group is there, also a dying one; a zombie, which nobody may reap, is not."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


class Run:
    """Ranks that run one script, each a process of its own. Each is told its numbers as by torchrun."""

    def __init__(
        self,
        script: Path,
        *words: object,
        ranks: int,
        limit: float = LIMIT,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        watched: bool = False,
    ) -> None:
        """Start the ranks. words: the script's flags; limit: seconds until all are ended, from when each has spoken.

        folder: where it runs, if not in one that goes with this run; watched: keep notes of what it does.
        """
        self.limit, self.ends = limit, [None] * ranks  # exit statuses: below 0 for a signal
        self.files = tempfile.TemporaryDirectory()
        self.logs = [Path(self.files.name, f"rank{rank}") for rank in range(ranks)]
        self.folder = folder or Path(self.files.name, "work")
        self.folder.mkdir(exist_ok=True)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        # Without GPUs, so that the messages and the numbers are the same on every machine.
        self.mark = uuid4().hex  # what the ranks start is found by it
        shared |= HERE | {MARK: self.mark, "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        shared, self.ranks = environment([ranks], shared), []
        for rank, log in enumerate(self.logs):
            log.touch()
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = [str(script), *map(str, words)], str(self.folder), log, own, watched
            self.ranks.append(START.Process(target=be_rank, args=given))
            self.ranks[-1].start()
        self.begin = time.monotonic()  # the first start of all waits until the server has imported torch
        self.until = self.begin + LIMIT

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
        end_all(self.mark)
        end = time.monotonic() + 5
        while any(has_group(rank.pid) for rank in self.ranks) and time.monotonic() < end:
            time.sleep(0.01)  # what they started is dying

    def said(self, rank: int) -> list[str]:
        """The lines of a rank."""
        return tidy(self.logs[rank].read_text(errors="replace")).splitlines()

    def complaint(self) -> str:
        """How the first rank that failed by itself ended, with its telling lines; nothing, if all went well."""
        for rank in sorted(range(len(self.ends)), key=lambda rank: self.ends[rank] in (None, -signal.SIGTERM)):
            if self.ends[rank] != 0:
                return "\n".join([f"rank {rank} {ended(self.ends[rank])}:", *telling(self.said(rank))])
        return ""

    def notes(self) -> list["RankNotes"]:
        """What each rank of a watched run has done."""
        from ddp_helpers.rank.watch import read_rank_notes

        paths = [self.folder / f"rank{rank}.notes" for rank in range(len(self.ranks))]
        return [read_rank_notes(path) for path in paths]


def attend(*runs: Run) -> None:
    """Wait until these runs have ended; an interrupt ends them all. The learner's process calls it."""
    waiting = list(runs)
    try:
        while waiting := [run for run in waiting if not run.over()]:
            time.sleep(0.05)
    finally:
        with no_interrupt():
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


def far(weights: Mapping, others: Mapping) -> float:
    """The largest difference of two networks' weights; infinite where their names differ."""
    if weights.keys() != others.keys():
        return float("inf")
    return max((float((weights[name] - others[name]).abs().max()) for name in weights), default=float("inf"))
