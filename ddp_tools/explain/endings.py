"""Read how processes ended from what their launchers say: torchrun, srun, mpirun, a shell, ours.

`judge` calls it with all lines of the logs.
"""

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddp_tools.explain.lines import Line

_SIGNALS = {signal.strsignal(number): -number for number in signal.valid_signals()}
_SIGNALS |= {number.name: -number.value for number in signal.Signals}
_SIGNALS |= {"Out Of Memory": -9, "Segfault": -11}
_WORDS = "|".join(re.escape(word) for word in sorted(filter(None, _SIGNALS), key=len, reverse=True))

_SRUN = re.compile(
    rf"srun: error: \S+: tasks? ([\d,\- ]+): (?:Exited with exit code (\d+)|({_WORDS}))"
)
_MPIRUN = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_OMPI_NAME = re.compile(r"Process name: \[(?:\[\d+,\d+\],|[\w.-]+@\d+,)(\d+)\]")
_OMPI_CODE = re.compile(r"^\s*Exit code: +(\d+)")
_INTEL = re.compile(r"=\s+(?:RANK (\d+) PID|KILLED BY SIGNAL: (\d+)|EXIT (?:CODE|STATUS): (\d+))")
_SPAWN = re.compile(
    r"[Pp]rocess (\d+) terminated with (?:the following error|signal (SIG\w+)|exit code (\d+))"
)
_OURS = re.compile(r"\brank (\d+) (?:exit status (\d+)|ended by (SIG[A-Z0-9]+))")
_FIELD = re.compile(r"^\s*(time|rank|exitcode) +: (?:(-?\d+)|.*)")
_AGENTS = re.compile(r"torch/distributed/(?:run|launcher|elastic)\b|\bsrun\b.*\btorchrun\b")
_AGENT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
# DeepSpeed, kubectl, PyCharm
_CODE = re.compile(
    r"\b(?:exits|exited|terminated|finished) with (?:return |exit )?code:? ?=? ?(-?\d+)"
)
_SHELL = re.compile(rf"line \d+: +\d+ ({_WORDS})\b|^({_WORDS}) \(core dumped\)")
_SHELL_BARE = re.compile(r"^(?:Killed|Segmentation fault|Bus error|Aborted|Terminated)\s*$")


_WORTH = re.compile(
    r"[Ee]xit|EXIT|RANK|rank +:|Root Cause|exited|ended by|(?:terminated|finished) with"
    r"|Process name|KILLED BY|srun: error|failed \(|core dumped|: +\d+ [A-Z]"
    r"|^(?:Killed|Segm|Bus|Abort|Termin)"
)


def _may_tell(line: Line) -> bool:
    """Say whether a line can tell of an ending: most lines of a long log cannot."""
    return _WORTH.search(line.text) is not None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its rank if that is known, and its exit status, below 0 for a signal."""

    rank: int | None
    status: int
    line: Line
    first: bool = False  # torchrun says that it was the first


def _signed(status: int) -> int:
    """Return a status as Python gives it: a shell adds 128 to a signal's number."""
    return 128 - status if 128 < status < 128 + 65 else status


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
    report = _Report(agents=any(_AGENTS.search(line.text) for line in lines))
    for line in filter(_may_tell, lines):
        for ending in report.add(line):
            if ending.status:
                yield ending


class _Report:
    """What must be remembered from line to line: a launcher's report of a rank has several."""

    def __init__(self, agents: bool = False) -> None:
        """Begin; agents: each task of srun is a torchrun, and no rank."""
        self._agents = agents
        self._rank: int | None = None
        self._first = False

    def add(self, line: Line) -> Iterator[Ending]:
        """Yield what this line ends."""
        text = line.text
        if "Root Cause (first observed failure)" in text:
            self._first = True
        elif match := _FIELD.match(text):
            if match[1] == "rank" and match[2]:
                self._rank = int(match[2])
            elif match[1] == "exitcode" and match[2]:
                yield Ending(self._rank, _signed(int(match[2])), line, self._first)
                self._first = False
        elif match := _SRUN.search(text):
            status = _signed(int(match[2])) if match[2] else _SIGNALS[match[3]]
            for rank in _task_numbers(match[1]):
                yield Ending(None if self._agents else rank, status, line)
        elif match := _MPIRUN.search(text):
            yield Ending(int(match[1]), -int(match[2]), line)
        elif match := _OMPI_NAME.search(text):
            self._rank = int(match[1])
        elif match := _OMPI_CODE.match(text):
            yield Ending(self._rank, _signed(int(match[1])), line)
        elif match := _INTEL.search(text):
            if match[1]:
                self._rank = int(match[1])
            else:
                status = -int(match[2]) if match[2] else _signed(int(match[3]))
                yield Ending(self._rank, status, line)
        elif match := _SPAWN.search(text):
            status = _SIGNALS.get(match[2], 1) if match[2] else int(match[3] or 1)
            yield Ending(int(match[1]), _signed(status), line)
        elif match := _CODE.search(text):
            yield Ending(line.rank, _signed(int(match[1])), line)
        elif match := _AGENT.search(text):
            # The number is of its node alone; the report below says the rank.
            yield Ending(None, _signed(int(match[1])), line)
        else:
            yield from _of_a_shell(line)


def _of_a_shell(line: Line) -> Iterator[Ending]:
    """Yield the endings that a shell, or a launcher of the course, writes into one line."""
    for rank, status, name in _OURS.findall(line.text):
        yield Ending(int(rank), int(status) if status else _SIGNALS.get(name, 1), line)
    if match := _SHELL.search(line.text) or _SHELL_BARE.match(line.text):
        word = next(filter(None, match.groups()), match[0].strip())
        yield Ending(line.rank, _SIGNALS.get(word, -1), line)
