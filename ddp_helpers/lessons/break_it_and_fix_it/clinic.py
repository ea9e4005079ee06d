"""The `%%clinic` magic of notebook 10: run one script with its fault and with its cure, and show what both say."""

import os
import re
import signal
import tempfile
import time
import uuid
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer

import psutil
from IPython.core.error import UsageError

from ddp_helpers import ROOT
from ddp_helpers.notebook.launch import Launch, LaunchError, take
from ddp_helpers.notebook.launchers import commands, environment
from ddp_helpers.notebook.processes import TimeLimit, ended, lines_of, marked
from ddp_helpers.notebook.screen import coloured

MARK = "DDP_COURSE_CASE"  # an environment variable that the processes of one case have
LIMIT = 90  # seconds for a run that is not meant to hang


@dataclass
class Case(Launch):
    """A launch, and how it ended: the launcher's exit status, below 0 for a signal, None at the time limit."""

    status: int | None = None

    def ends(self) -> dict[str, int]:
        """The exit status of each rank that failed by itself, as torchrun reports it."""
        said = "\n".join(line for who, line in self.lines if not who)
        found = re.findall(r"^ *rank +: (\d+).*\n *exitcode +: (-?\d+)", said, re.M)
        return {rank: int(code) for rank, code in found if int(code) != -signal.SIGTERM}  # so torchrun ends the others

    def spoke(self, ranks: int) -> bool:
        """Whether every rank has said something."""
        return len({who for who, _ in self.lines if who or ranks == 1}) == ranks

    def went(self, how: str) -> bool:
        """Whether it ended as it was meant to."""
        killed = min([self.status or 0, *self.ends().values()]) < 0
        ways = {"hangs": self.status is None, "lies": self.status == 0, "fails": bool(self.status)}
        return ways.get(how, killed)


class Silent:
    """A screen that shows nothing: two launches at once would write over each other."""

    def add(self, label: str, line: str) -> None:
        """Show nothing."""


def attend(script: Path, ranks: int, limit: float = LIMIT, extra: Mapping[str, str] | None = None) -> Case:
    """Run a script on so many ranks and keep what they say; the learner's process calls it. One rank is plain Python.

    limit: seconds until all are ended, from when each rank has said something. Raises LaunchError if they never do.
    """
    launcher, mark, begin = "torchrun" if ranks > 1 else "python", uuid.uuid4().hex, time.monotonic()
    # Without GPUs, so that the messages are the same on every machine.
    env = environment([ranks], {"CUDA_VISIBLE_DEVICES": "", MARK: mark, **(extra or {})})
    case, late = Case([], 0.0), Event()
    alarm = Timer(limit, lambda: (late.set(), end(MARK, mark)))
    with tempfile.TemporaryDirectory() as logs:
        start = commands(launcher, [str(script)], [ranks], logs)
        try:
            with closing(lines_of(start, env, LIMIT + limit)) as lines:
                for line in lines:
                    if isinstance(line, list):
                        [case.status] = line
                    else:
                        take(line, launcher, case, Silent())
                    if case.spoke(ranks) and not alarm.ident:
                        alarm.start()
        except TimeLimit:
            raise LaunchError(f"not every rank has said something in {LIMIT + limit:g} s") from None
    if late.is_set():
        case.status = None
    alarm.cancel()
    case.seconds = time.monotonic() - begin
    return case


def end(name: str, value: str) -> None:
    """End every process that bears this variable, and wait until it is gone."""
    found = marked(value, name)
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=5)


TAG = "DDP_COURSE_CLINIC"  # an environment variable that every process of this notebook inherits
# What stands around a cell: the same few lines in most scripts. They go before it as one line, in the place of the
# magic's own, so that the line numbers of errors are those of the cell.
BEFORE = [
    "import faulthandler, os, signal, time",
    "from datetime import timedelta",
    "import torch, torch.distributed as dist",
    "from torch import nn",
    "from torch.nn.parallel import DistributedDataParallel as DDP",
    'dist.init_process_group("gloo")',
    "rank = dist.get_rank()",
]
AFTER = [
    "dist.barrier()",
    "time.sleep(0.1)  # gloo's threads must let go of the last tensors, or the process aborts at its end",
    "dist.destroy_process_group()",
]
FRAME = "\n".join([*BEFORE, "", "# the cell stands here", "", *AFTER])
LINE = r"\s*([1-9]\d?)\s+(fails|aborts|lies|hangs\s+limit=(\d+))(\s+bare)?((?:\s+[A-Z_]+=\S+)*)\s*"
WIDTH, MOST = 240, 7  # letters of a line, and lines of a rank, that are shown
# What tells nothing: the frames of Python and of C++, and what stands around them.
NOISE = re.compile(r"\s(?! what)|$|Traceback|frame #|<omitting|Exception raised|Thread 0x|The above|During|terminate c")
STACK = re.compile(r' *File "(?P<file>[^"]*)", line (?P<line>\d+) in ')  # as faulthandler writes it
STAMP = re.compile(r"\[[WE]\d+ [\d:.]+ \S+\] (\[c10d\] )?|\S+\.py:\d+: ")  # when, and where in torch, it was said


def left() -> list[psutil.Process]:
    """Every process that this notebook has started, by whatever way, and that is still there."""
    return marked(os.environ[TAG], TAG)


def telling(lines: list[str]) -> list[str]:
    """The lines of a rank that say what it did, or what went wrong; of several alike, one."""
    kept = []
    for line in lines:
        if found := STACK.match(line):
            if "/build/cells/" in found["file"]:
                kept.append(f"in line {found['line']} of the cell")
        elif not NOISE.match(line):
            kept.append(STAMP.sub("", line, count=1).strip())
    return [line if len(line) <= WIDTH else f"{line[:WIDTH]} …" for line in dict.fromkeys(kept)][-MOST:]


def show(label: str, case: Case, ranks: int) -> None:
    """Print how a case ended, and each rank's telling lines."""
    ends = "".join(f", rank {rank} {ended(code)}" for rank, code in sorted(case.ends().items()))
    print(f"{label}: {'torchrun' if ranks > 1 else 'Python'} {ended(case.status)}{ends}; {case.seconds:.0f} s")
    for rank in range(ranks) if ranks > 1 else [""]:
        for line in telling(case.of(rank)):
            print(" ", coloured(f"rank {rank}", line))


def clinic_magic(line: str, cell: str) -> None:
    """Run this cell twice at once, with CURED = False and True: `%%clinic 2 fails`, aborts, lies, hangs limit=8.

    The ranks form a group first and leave it at last, unless the line says `bare`, or there is one rank. NAME=value
    behind it is for the environment. Raises LaunchError if the broken run does not end as said, if the cured one
    fails, or if a process is left.
    """
    found = re.fullmatch(LINE, line)
    if not found:
        raise UsageError(f"%%clinic {line}: give the ranks, then fails, aborts, lies or hangs limit=SECONDS")
    ranks, how, framed = int(found[1]), found[2].split()[0], found[1] != "1" and not found[4]
    scripts = [written(cell, framed, cured) for cured in (False, True)]
    extra, limits = dict(word.split("=", 1) for word in found[5].split()), [float(found[3] or LIMIT), LIMIT]
    with ThreadPoolExecutor(2) as pool:
        try:
            broken, cured = pool.map(attend, scripts, [ranks] * 2, limits, [extra] * 2)
        except BaseException:  # an interrupt, for one: the two launches end with their processes
            end(TAG, os.environ[TAG])
            raise
    show("broken", broken, ranks)
    show("cured", cured, ranks)
    judge(broken, cured, how)


def judge(broken: Case, cured: Case, how: str) -> None:
    """Raise LaunchError unless the fault showed as said, the cure cured, and nothing is left."""
    if not broken.went(how):
        raise LaunchError(f"the broken run was to be one that {how}, but: {ended(broken.status)}")
    if cured.status != 0:
        raise LaunchError(f"the cured run is not cured: {ended(cured.status)}")
    if there := left():
        raise LaunchError(f"{len(there)} processes are left: {' '.join(process.name() for process in there)}")


def written(cell: str, framed: bool, cured: bool) -> Path:
    """The cell as a script, in which CURED is known."""
    before, after = (BEFORE, AFTER) if framed else ([], [])
    text = "\n".join(["; ".join([f"CURED = {cured}", *before]), cell.rstrip("\n"), *after, ""])
    path = ROOT / "build" / "cells" / f"clinic_{zlib.crc32(text.encode()):08x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load_ipython_extension(shell) -> None:
    """Make `%%clinic` known, for %load_ext. What is started from then on bears the tag."""
    os.environ[TAG] = uuid.uuid4().hex
    shell.register_magic_function(clinic_magic, "cell", "clinic")
