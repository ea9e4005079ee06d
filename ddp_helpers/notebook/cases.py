"""One launch of the clinic: a script on its ranks, what each said, how it ended, and that nothing of it is left."""

import re
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer

import psutil

from ddp_helpers.notebook.launch import Launch, LaunchError, take
from ddp_helpers.notebook.launchers import commands, environment
from ddp_helpers.notebook.processes import TimeLimit, lines_of, marked

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


def ended(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "still there at the time limit"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
