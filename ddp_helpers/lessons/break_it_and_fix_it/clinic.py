"""The `%%clinic` magic of 10 and 10b: run a cell with its fault and with its fix, and show both.

The notebook loads it by %load_ext. It needs no ranks: it starts those of both runs itself.

To add a fault to 10b: a row of the table at its start, with words of the true message; a section
with `<a id="fault-32"></a>` and `### 32 · Name`, with *Why*, *Find it*, *Fix*; and a cell
`%%clinic 2 fails` (or `aborts`, `lies`, `hangs`) with fault and fix, told apart by FIXED,
without the lines that FRAME below puts around it (after the word `bare`, without the imports). Its
number is in figures.py of this lesson and in tests/lessons/test_clinic.py. Execute 10 and 10b, copy
the words in backticks from the output, and ask `explain` about it: an unknown message needs a rule.
"""

import re
import signal
import zlib
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from ddp_helpers import ROOT, own_folder
from ddp_helpers.launch.engine import LaunchError, warm_server
from ddp_helpers.launch.processes import exit_text
from ddp_helpers.launch.screen import coloured_line
from ddp_helpers.lessons.run_script import LIMIT, LearnerRun, telling_lines, wait_for_runs

# The lines around a cell, the same in most scripts. They go before it as one line, which replaces
# the magic's own, so that the line numbers of errors are those of the cell.
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

# How the broken run ends; then perhaps `bare`, and variables of the environment.
_LINE = re.compile(
    r"([1-9]\d?) (fails|aborts|lies|hangs)( bare)?((?: [A-Z_]+=\S+)*)",
)
HANG_LIMIT = 3.0  # seconds after which a run that hangs is ended


def clinic_magic(line: str, cell: str) -> None:
    """Run a cell twice in parallel, with FIXED = False and with FIXED = True.

    line: the number of ranks, and how the broken run ends, as in `%%clinic 2 fails`: fails, aborts,
    lies or hangs. The ranks join a group first and leave it last, unless the line says `bare`.
    Each NAME=value at its end is set in the environment.
    Raises UsageError for a bad line; LaunchError if the broken run does not end as the line says,
    or if the fixed one fails.
    """
    match = _LINE.fullmatch(line)
    if not match:
        form = "give the ranks, then fails, aborts, lies or hangs"
        raise UsageError(f"%%clinic {line}: {form}")
    ranks, outcome, bare, variables = match.groups()
    env = dict(word.split("=", 1) for word in variables.split())
    runs = {}
    for label, limit in (("broken", HANG_LIMIT if outcome == "hangs" else LIMIT), ("fixed", LIMIT)):
        script = write_cell_script(cell, framed=not bare, fixed=label == "fixed")
        runs[label] = LearnerRun(script, ranks=int(ranks), limit=limit, env=env)
    wait_for_runs(*runs.values())
    for label, run in runs.items():
        _show(label, run)
    broken, fixed = runs.values()
    if not _ended_as_meant(broken.exit_statuses, outcome):
        raise LaunchError(f"the broken run should be one that {outcome}, but: {_ends(broken)}")
    if any(status != 0 for status in fixed.exit_statuses):
        raise LaunchError(f"the fixed run still fails: {_ends(fixed)}")


def write_cell_script(cell: str, framed: bool, fixed: bool) -> Path:
    """Write a cell as a script that defines FIXED, with FRAME around it if framed."""
    join, leave = (JOIN, LEAVE) if framed else ([], [])
    first_line = "; ".join([f"FIXED = {fixed}", *IMPORTS, *join])
    text = "\n".join([first_line, cell.rstrip("\n"), *leave, ""])
    path = own_folder(ROOT / "build" / "cells") / f"clinic_{zlib.crc32(text.encode()):08x}.py"
    path.write_text(text)
    return path


def _show(label: str, run: LearnerRun) -> None:
    """Print how each rank of a run ended, and its telling lines."""
    print(f"{label}: {_ends(run)}; {run.seconds:.0f} s")
    for rank in range(len(run.exit_statuses)):
        for line in telling_lines(run.lines_of_rank(rank)):
            print(" ", coloured_line(f"rank {rank}", line))


def _ends(run: LearnerRun) -> str:
    """Say how each rank of a run ended."""
    ends = enumerate(map(exit_text, run.exit_statuses))
    return ", ".join(f"rank {rank} {end}" for rank, end in ends)


def _ended_as_meant(statuses: list[int | None], outcome: str) -> bool:
    """Whether these exit statuses mean this outcome: fails, aborts, lies or hangs."""
    match outcome:
        case "hangs":
            return None in statuses
        case "lies":
            return all(status == 0 for status in statuses)
        case "aborts":  # a signal ended a rank, other than the one that ends the ranks left
            return any(status and status < 0 and status != -signal.SIGTERM for status in statuses)
        case _:
            return any(statuses)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register `%%clinic`, and start the server of ranks: it imports torch meanwhile."""
    warm_server()
    register = shell.register_magic_function
    register(clinic_magic, "cell", "clinic")  # type: ignore[arg-type]  # IPython types it unbound
