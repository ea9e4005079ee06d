"""Read how processes ended from what their launchers say: torchrun, srun, mpirun, a shell, ours.

`judge` calls it with all lines of the logs.
"""

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ddp_tools.explain.lines import Line
from ddp_tools.explain.prefixes import shows_agents

_SIGNALS = {signal.strsignal(number): -number for number in signal.valid_signals()}
_SIGNALS |= {number.name: -number.value for number in signal.Signals}
_SIGNALS |= {"Out Of Memory": -9, "Segfault": -11}
_WORDS = "|".join(re.escape(word) for word in sorted(filter(None, _SIGNALS), key=len, reverse=True))

# How launchers say that a process ended: its rank or tasks, and a status, a signal or its name.
# Where a form has no rank, it is that of a line before it ("report"), of the line itself, or none.
_TASKS = r"srun: error: \S+: tasks? (?P<tasks>[\d,\- ]+): "
_RANK, _STATUS = r"(?P<rank>\d+)", r"(?P<status>-?\d+)"
_FORMS = [
    (owner, re.compile(form))
    for owner, form in (
        ("", rf"{_TASKS}(?:Exited with exit code {_STATUS}|(?P<name>{_WORDS}))"),
        ("", rf"process rank {_RANK} with PID \d+ on node \S+ exited on signal (?P<signal>\d+)"),
        ("", rf"\brank {_RANK} (?:exit status {_STATUS}|ended by (?P<name>SIG[A-Z0-9]+))"),
        ("", rf"[Pp]rocess {_RANK} terminated with exit code {_STATUS}"),
        ("", rf"[Pp]rocess {_RANK} terminated with (?:signal )?(?P<name>SIG\w+|the following)"),
        # torchrun, Open MPI, Intel MPI
        ("report", rf"^\s*rank +: {_RANK}"),
        ("report", rf"^\s*(?:exitcode +:|Exit code:) +{_STATUS}"),
        ("report", rf"Process name: \[(?:\[\d+,\d+\],|[\w.-]+@\d+,){_RANK}\]"),
        ("report", rf"process rank {_RANK} with PID \d+ on node \S+ exited on$"),  # Open MPI 5
        ("report", rf"^signal (?P<signal>\d+) \((?:{_WORDS})\)\.$"),
        ("report", rf"=\s+RANK {_RANK} PID"),
        ("report", rf"=\s+(?:KILLED BY SIGNAL: (?P<signal>\d+)|EXIT \w+: {_STATUS})"),
        # DeepSpeed, kubectl, PyCharm; a shell
        ("line", rf"\b(?:exit|terminat|finish)(?:s|ed) with (?:\w+ )?code:? ?=? ?{_STATUS}"),
        ("line", rf"line \d+: +\d+ (?P<name>{_WORDS})\b"),
        ("line", rf"^(?P<name>{_WORDS}) \(core dumped\)"),
        ("line", r"^(?P<name>Killed|Segmentation fault|Bus error|Aborted|Terminated)\s*$"),
        # The number is of its node alone; the report below says the rank.
        ("", rf"failed \(exitcode: {_STATUS}\) local_rank: \d+"),
    )
]
_WORTH = re.compile(  # most lines of a long log tell of no ending
    r"[Ee]xit(?:s|ed|code| code| status|ing)\b|EXIT|RANK|rank +:|Root Cause|ended by|ed with"
    r"|Process name|KILLED BY|srun: error|failed \(exitcode|core dumped|line \d+: +\d+ [A-Z]"
    r"|^(?:Killed|Segm|Bus|Abort|Termin|signal \d)"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its rank if that is known, and its exit status, below 0 for a signal."""

    rank: int | None
    status: int
    line: Line
    first: bool = False  # torchrun says that it was the first


def _task_numbers(text: str) -> list[int]:
    """Read Slurm's list of tasks, as in 0-2,5."""
    ranks: list[int] = []
    for part in re.findall(r"(\d+)(?:-(\d+))?", text):
        first, last = int(part[0]), int(part[1] or part[0])
        ranks += range(first, min(last, first + 4096) + 1)
    return ranks


def read_endings(lines: Iterable[Line]) -> Iterator[Ending]:
    """Yield all endings with a status that is not 0, in the order of the lines."""
    lines = list(lines)
    agents = shows_agents(line.text for line in lines)  # then a task of srun is no rank
    kept: int | None = None  # the rank of a report, whose status stands on a later line
    first = False
    for line in lines:
        if not _WORTH.search(line.text):
            continue
        first |= "Root Cause (first observed failure)" in line.text
        for owner, match in _matches(line.text):
            got = {name: value for name, value in match.groupdict().items() if value}
            ranks = _task_numbers(got.get("tasks") or got.get("rank", ""))
            status = _status(got)
            if status is None:
                kept = ranks[0]
            whose = {"report": kept, "line": line.rank}.get(owner)
            for rank in ranks or (whose,):
                if status:
                    yield Ending(None if agents and "tasks" in got else rank, status, line, first)
            first &= status is None


def _matches(text: str) -> Iterable[tuple[str, re.Match[str]]]:
    """Return what matches of the first form that does; several ranks may stand in one line."""
    found = ([(owner, match) for match in form.finditer(text)] for owner, form in _FORMS)
    return next(filter(None, found), [])


def _status(got: Mapping[str, str]) -> int | None:
    """Return a status as Python gives it, below 0 for a signal; a shell adds 128 to its number."""
    if "signal" in got:
        return -int(got["signal"])
    if "name" in got:
        return _SIGNALS.get(got["name"], 1)
    status = int(got["status"]) if "status" in got else None
    return 128 - status if status and 128 < status < 128 + 65 else status
