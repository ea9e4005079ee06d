"""The `%%clinic` magic of 10 and 10b: run a cell with its fault and with its cure, and show both.

The notebook loads it by %load_ext. It needs no ranks: it starts those of both runs on this machine.

To add a fault to 10b: a row of the table at its beginning, with words of the true message; a
section with `<a id="fault-32"></a>` and `### 32 · Name`, with *Why*, *Find it*, *Cure*; and a cell
`%%clinic 2 fails` (or `aborts`, `lies`, `hangs limit=8`) with fault and cure, told apart by CURED,
between what FRAME below puts around it (only the imports after the word `bare`). Its number stands
in figures.py of this lesson and in tests/test_clinic.py. Execute 10 and 10b, copy the words in
backticks from the output, and ask `explain` about it: a message that it does not know is a rule.
"""

import re
import signal
import zlib
from pathlib import Path
from typing import NamedTuple

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from ddp_helpers import ROOT
from ddp_helpers.launch.engine import warm_server
from ddp_helpers.launch.launch import LaunchError
from ddp_helpers.launch.processes import exit_text
from ddp_helpers.launch.screen import coloured_line
from ddp_helpers.lessons.run_script import LIMIT, LearnerRun, telling_lines, wait_for_runs

# What stands around a cell: the same few lines in most scripts. They go before it as one line,
# in the place of the magic's own, so that the line numbers of errors are those of the cell.
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

_LINE = re.compile(
    r"""
    \s* (?P<ranks> [1-9]\d? ) \s+
    (?: (?P<outcome> fails | aborts | lies ) | hangs \s+ limit=(?P<limit> \d+ ) )
    (?P<bare> \s+ bare )?
    (?P<env> (?: \s+ [A-Z_]+=\S+ )* )
    \s*
    """,
    re.VERBOSE,
)


class _Experiment(NamedTuple):
    """What the line of a cell asks for."""

    ranks: int
    outcome: str  # of the broken run: fails, aborts, lies or hangs
    limit: float  # seconds for the broken run
    framed: bool  # whether FRAME stands around the cell
    env: dict[str, str]


def clinic_magic(line: str, cell: str) -> None:
    """Run a cell twice at once, with CURED = False and with CURED = True.

    line: the number of ranks, and how the broken run ends, as in `%%clinic 2 fails`: fails, aborts,
    lies, or hangs limit=8. The ranks join a group first and leave it last, unless the line says
    `bare`. Each NAME=value at its end is set in the environment.
    Raises LaunchError if the broken run does not end as the line says, or the cured one fails.
    """
    experiment = _parsed(line)
    ranks, env = experiment.ranks, experiment.env
    broken_script = write_cell_script(cell, experiment.framed, cured=False)
    cured_script = write_cell_script(cell, experiment.framed, cured=True)
    broken = LearnerRun(broken_script, ranks=ranks, limit=experiment.limit, env=env)
    cured = LearnerRun(cured_script, ranks=ranks, env=env)
    wait_for_runs(broken, cured)
    _show("broken", broken)
    _show("cured", cured)
    if not _ended_as_meant(broken, experiment.outcome):
        ends = ", ".join(map(exit_text, broken.exit_statuses))
        raise LaunchError(f"the broken run was to be one that {experiment.outcome}, but: {ends}")
    if cured.exit_statuses != [0] * ranks:
        ends = ", ".join(map(exit_text, cured.exit_statuses))
        raise LaunchError(f"the cured run is not cured: {ends}")


def _parsed(line: str) -> _Experiment:
    """Read the line of a cell. Raises UsageError where it is not as clinic_magic says."""
    match = _LINE.fullmatch(line)
    if not match:
        form = "give the ranks, then fails, aborts, lies or hangs limit=SECONDS"
        raise UsageError(f"%%clinic {line}: {form}")
    variables = [assignment.partition("=") for assignment in match["env"].split()]
    return _Experiment(
        ranks=int(match["ranks"]),
        outcome=match["outcome"] or "hangs",
        limit=float(match["limit"] or LIMIT),
        framed=not match["bare"],
        env={name: value for name, _, value in variables},
    )


def write_cell_script(cell: str, framed: bool, cured: bool) -> Path:
    """Write a cell as a script in which CURED is known, with FRAME around it if framed."""
    join, leave = (JOIN, LEAVE) if framed else ([], [])
    first_line = "; ".join([f"CURED = {cured}", *IMPORTS, *join])
    text = "\n".join([first_line, cell.rstrip("\n"), *leave, ""])
    path = ROOT / "build" / "cells" / f"clinic_{zlib.crc32(text.encode()):08x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _show(label: str, run: LearnerRun) -> None:
    """Print how each rank of a run ended, and its telling lines."""
    ends = ", ".join(
        f"rank {rank} {exit_text(status)}" for rank, status in enumerate(run.exit_statuses)
    )
    print(f"{label}: {ends}; {run.seconds:.0f} s")
    for rank in range(len(run.exit_statuses)):
        for line in telling_lines(run.lines_of_rank(rank)):
            print(" ", coloured_line(f"rank {rank}", line))


def _ended_as_meant(run: LearnerRun, outcome: str) -> bool:
    """Whether a run that has ended had this outcome: fails, aborts, lies or hangs."""
    hung = None in run.exit_statuses
    match outcome:
        case "hangs":
            return hung
        case "lies":
            return not hung and not any(run.exit_statuses)
        case "aborts":  # a signal ended a rank, other than the one that ends who is left
            return any(
                status and status < 0 for status in run.exit_statuses if status != -signal.SIGTERM
            )
        case _:
            return any(run.exit_statuses)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Make `%%clinic` known, and start the server of ranks: it imports torch meanwhile."""
    warm_server()
    register = shell.register_magic_function
    register(clinic_magic, "cell", "clinic")  # type: ignore[arg-type]  # IPython types it unbound
