"""A job for Slurm, checked before any of it is written to a file that a shell reads.

The caller makes a `Job`; `sbatch.render` turns it into the sbatch file for a cluster.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_tools import PlainError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
# The forms that sbatch accepts: minutes, minutes:seconds, hours:minutes:seconds,
# or, after days-, hours, hours:minutes, hours:minutes:seconds.
TIME = re.compile(r"(?=.*[1-9])(\d{1,7}(:[0-5]\d){0,2}|\d{1,5}-\d{1,5}(:[0-5]\d){0,2})", re.ASCII)
_OPTION = re.compile(r"--[a-z][a-z-]*(=[^\"'\\\x00-\x1f\x7f\ud800-\udfff]*)?", re.ASCII)
_VALUE = re.compile(r"[\w.+-]+", re.ASCII)
# Characters that no command line, or no UTF-8 file, can contain.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_SECONDS, _MINUTES, _HOURS, _DAYS = 1, 60, 3600, 86400
_LARGEST_COUNT = 99_999
RUN_DIR, ARRAY = "{run_dir}", "{array}"
FOLDER = re.compile("[^:\x00-\x1f\x7f\ud800-\udfff]*")  # that PYTHONPATH and a job file accept


class JobError(PlainError, ValueError):
    """An invalid job; one line with what is wrong, the value, and the fix."""


@dataclass(frozen=True)
class Job:
    """A job: ranks, each with its own GPU, that run one program.

    Raises JobError at a value that cannot be used.

    program: the arguments of Python, a script and its arguments. {run_dir} in an argument means the
    folder of the run's record; {array} means the value of this task, if the job is an array.
    """

    name: str
    program: Sequence[str]
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0  # the number of ranks, or 0: then the ranks use CPUs
    cpus_per_rank: int = 1
    time: str = "00:10:00"
    # What starts the ranks: srun, one task per rank, or torchrun on each node.
    launcher: Literal["srun", "torchrun"] = "srun"
    # A task for each value, all running at once if there is room.
    array: Sequence[str] = ()
    # More options of sbatch, such as --account=physics, which override the site's.
    sbatch: Sequence[str] = ()
    # Whether the program can resume, as mnist_ddp_resumable does.
    requeue: bool = False
    # Seconds before its end at which it is warned, or up to 60 s earlier; 0: it gets no signal.
    grace: int = 120
    # The folder of the copied script, from which it imports its own modules.
    imports_from: str = ""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.ranks_per_node

    def filled_in(self, run_dir: Path, value: str) -> list[str]:
        """Return the program with a folder for {run_dir}, and a value for {array}."""
        program = [argument.replace(RUN_DIR, str(run_dir)) for argument in self.program]
        return [argument.replace(ARRAY, value) for argument in program]

    def __post_init__(self) -> None:
        check_text("name", self.name, NAME, "letters, digits, dot, dash and underscore, at most 64")
        self._check_shape()
        self._check_time()
        if self.launcher not in ("srun", "torchrun"):
            choices = "choose srun (a task per rank) or torchrun (a task per node)"
            raise JobError(f"launcher={self.launcher!r}: {choices}")
        _check_program(self.program)
        _check_list("sbatch", self.sbatch, "a list of options")
        for option in self.sbatch:
            allowed = "--name or --name=value, the long form, without quotes"
            check_text("sbatch", option, _OPTION, allowed)
        self._check_array()
        allowed = "a folder without a colon, a line break and the like"
        check_text("imports_from", self.imports_from, FOLDER, allowed)

    def _check_shape(self) -> None:
        """Raise JobError unless nodes, ranks, CPUs and GPUs are counts that fit together."""
        _check_count("nodes", self.nodes, least=1)
        _check_count("gpus_per_node", self.gpus_per_node, least=0)
        _check_count("ranks_per_node", self.ranks_per_node, least=1)
        _check_count("cpus_per_rank", self.cpus_per_rank, least=1)
        if self.gpus_per_node not in (0, self.ranks_per_node):
            counts = f"ranks_per_node={self.ranks_per_node} but gpus_per_node={self.gpus_per_node}"
            cure = "make them equal (or gpus_per_node=0 to train on CPUs)"
            raise JobError(f"{counts}: DDP runs one rank for each GPU, so {cure}")

    def _check_time(self) -> None:
        """Raise JobError unless the time is a limit of Slurm's, and leaves time for the warning."""
        allowed = "minutes, HH:MM:SS, or D-HH:MM:SS, more than 0, such as 00:30:00"
        check_text("time", self.time, TIME, allowed)
        _check_count("grace", self.grace, least=0)
        if not isinstance(self.requeue, bool):
            raise JobError(f"requeue={self.requeue!r} cannot be used: give True or False")
        if self.requeue and self.grace and seconds(self.time) <= self.grace + 60:
            raise JobError(
                f"time={self.time!r} is too short: the job is told to stop {self.grace} s "
                "before its end, and up to 60 s earlier: ask for more time"
            )

    def _check_array(self) -> None:
        """Raise JobError unless the array is a list of values, and the program uses them."""
        _check_list("array", self.array, "a list of values")
        for value in self.array:
            check_text("array", value, _VALUE, "values of letters, digits, dot, plus and dash")
        in_program = any(ARRAY in argument for argument in self.program)
        if in_program != bool(self.array):
            pair = f"array={self.array!r} and {ARRAY} in the program"
            raise JobError(f"{pair} belong together: give both")


def check_text(field: str, value: object, pattern: re.Pattern[str], allowed: str) -> str:
    """Return a value if it is text of this pattern; else raise JobError with the allowed form."""
    if not (isinstance(value, str) and pattern.fullmatch(value)):
        raise JobError(f"{field}={value!r} cannot be used: give {allowed}")
    return value


def _check_count(field: str, value: object, least: int) -> None:
    """Raise JobError unless the value is a whole number in the range that a cluster can have."""
    if type(value) is not int or not least <= value <= _LARGEST_COUNT:
        allowed = f"a whole number, {least} to {_LARGEST_COUNT}"
        raise JobError(f"{field}={value!r} cannot be used: give {allowed}")


def _check_list(field: str, value: object, allowed: str, least: int = 0) -> None:
    """Raise JobError unless the value is a tuple or a list: text would pass for its letters."""
    if not isinstance(value, (tuple, list)) or len(value) < least:
        raise JobError(f"{field}={value!r} cannot be used: give {allowed}")


def _check_program(program: Sequence[str]) -> None:
    """Raise JobError unless the program is a list of texts that a command line can hold."""
    _check_list("program", program, "a script and its arguments as a list of words", least=1)
    for argument in program:
        if not isinstance(argument, str) or _UNPRINTABLE.search(argument):
            cure = "give text without line breaks and the like"
            raise JobError(f"program: the word {argument!r} cannot be used: {cure}")


def seconds(limit: str) -> int:
    """Convert one of Slurm's time limits to seconds."""
    days, _, clock = limit.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    # Without days, one number is minutes, and two are minutes:seconds; after days they are hours,
    # and hours:minutes.
    first_unit = 3 if days or len(numbers) == 3 else 2
    numbers += [0] * (first_unit - len(numbers))
    total = int(days or 0) * _DAYS
    for number, unit in zip(reversed(numbers), (_SECONDS, _MINUTES, _HOURS), strict=False):
        total += number * unit
    return total
