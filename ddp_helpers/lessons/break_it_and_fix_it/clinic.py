"""The `%%clinic` magic of notebook 10: run one script with its fault and with its cure, and show what both say."""

import multiprocessing.forkserver
import re
import signal
import zlib
from pathlib import Path

from IPython.core.error import UsageError

from ddp_helpers import ROOT
from ddp_helpers.launch.launch import LaunchError
from ddp_helpers.launch.processes import ended
from ddp_helpers.launch.screen import coloured
from ddp_helpers.lessons.run_script import LIMIT, Run, attend, telling

# What stands around a cell: the same few lines in most scripts. They go before it as one line, in the place of the
# magic's own, so that the line numbers of errors are those of the cell.
IMPORTS = [
    "import faulthandler, os, signal, time",
    "from datetime import timedelta",
    "import torch, torch.distributed as dist",
    "from torch import nn",
    "from torch.nn.parallel import DistributedDataParallel as DDP",
]
JOIN = ['dist.init_process_group("gloo")', "rank = dist.get_rank()"]
LEAVE = ["dist.barrier()", "dist.destroy_process_group()"]
FRAME = "\n".join([*IMPORTS, "", *JOIN, "# the cell stands here", *LEAVE])
LINE = r"\s*([1-9]\d?)\s+(fails|aborts|lies|hangs\s+limit=(\d+))(\s+bare)?((?:\s+[A-Z_]+=\S+)*)\s*"


def show(label: str, run: Run) -> None:
    """Print how each rank ended, and its telling lines."""
    ends = ", ".join(f"rank {rank} {ended(status)}" for rank, status in enumerate(run.ends))
    print(f"{label}: {ends}; {run.seconds:.0f} s")
    for rank in range(len(run.ends)):
        for line in telling(run.said(rank)):
            print(" ", coloured(f"rank {rank}", line))


def went(run: Run, how: str) -> bool:
    """Whether a run ended as it was meant to."""
    stays, killed = None in run.ends, min(status or 0 for status in run.ends if status != -signal.SIGTERM) < 0
    return {"hangs": stays, "lies": not stays and not any(run.ends), "aborts": killed}.get(how, any(run.ends))


def clinic_magic(line: str, cell: str) -> None:
    """Run this cell twice at once, with CURED = False and True: `%%clinic 2 fails`, aborts, lies, hangs limit=8.

    The ranks form a group first and leave it at last, unless the line says `bare`. NAME=value behind it is for the
    environment. Raises LaunchError if the broken run does not end as said, or if the cured one fails.
    """
    found = re.fullmatch(LINE, line)
    if not found:
        raise UsageError(f"%%clinic {line}: give the ranks, then fails, aborts, lies or hangs limit=SECONDS")
    size, how, extra = int(found[1]), found[2].split()[0], dict(word.split("=", 1) for word in found[5].split())
    broken = Run(written(cell, not found[4], False), ranks=size, limit=float(found[3] or LIMIT), env=extra)
    cured = Run(written(cell, not found[4], True), ranks=size, env=extra)
    attend(broken, cured)
    show("broken", broken)
    show("cured", cured)
    if not went(broken, how):
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
