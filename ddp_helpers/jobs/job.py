"""What is asked of Slurm: a job, checked before any of it reaches a file that a shell reads."""

import re
from dataclasses import dataclass
from typing import Literal

from ddp_helpers import PlainError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
MEMORY = re.compile(r"[1-9]\d*[KMGT]?", re.ASCII)
VALUE = re.compile(r"[\w.+-]+", re.ASCII)
# The forms that sbatch knows: minutes, minutes:seconds, hours:minutes:seconds, and the same after days-.
TIME = re.compile(r"(?=.*[1-9])(\d{1,7}(:[0-5]\d){0,2}|\d{1,5}-\d{1,5}(:[0-5]\d){0,2})", re.ASCII)
ODD = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # what no command line, or no file in UTF-8, can hold
UNITS = (1, 60, 3600, 86400)
MOST = 99_999
# Who gives a number by another name.
GIVEN = {"tasks_per_node": ", with --gpus or, in job.ipynb, gpus_per_node", "cpus_per_task": ", with --cpus"}
RUN_DIR, ARRAY = "{run_dir}", "{array}"


class JobError(PlainError, ValueError):
    """A job that cannot be; one line with what is wrong, the value seen, and what to do."""


@dataclass(frozen=True)
class Job:
    """A job: so many ranks, each on a GPU of its own, that run one program. Raises JobError if it cannot be.

    program: what Python is given, a script and its arguments. {run_dir} in a word stands for the folder of the run's
    record; {array} for the value of this task, where the job is an array over several.
    """

    name: str
    program: tuple[str, ...]
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0  # as many as tasks, or none: then the ranks use CPUs
    cpus_per_task: int = 1
    time: str = "00:10:00"
    memory: str = ""  # per node, such as 32G; the site's or the partition's own without it
    launcher: Literal["srun", "torchrun"] = "srun"  # who starts the ranks: a srun task each, or torchrun on each node
    array: tuple[str, ...] = ()  # a task for each value, all running at once if there is room
    requeue: bool = False  # whether the program can go on where it stopped, as mnist_ddp_resumable does
    grace: int = 120  # seconds before the end at which it is warned, or up to 60 s earlier; 0: it hears no signal

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.tasks_per_node

    def __post_init__(self) -> None:
        check("name", self.name, NAME, "letters, digits, dot, dash and underscore, at most 64")
        for what in ("nodes", "tasks_per_node", "cpus_per_task"):
            check_count(what, getattr(self, what), least=1)
        check_count("gpus_per_node", self.gpus_per_node, least=0)
        if self.gpus_per_node not in (0, self.tasks_per_node):
            raise JobError(
                f"tasks_per_node={self.tasks_per_node} but gpus_per_node={self.gpus_per_node}: DDP runs one task for "
                "each GPU, so make them equal (or gpus_per_node=0 to train on CPUs)"
            )
        check("time", self.time, TIME, "minutes, HH:MM:SS, or D-HH:MM:SS, more than 0, such as 00:30:00")
        check_count("grace", self.grace, least=0)
        if not isinstance(self.requeue, bool):
            raise JobError(f"requeue={self.requeue!r} cannot be used: give True or False")
        if self.requeue and self.grace and seconds(self.time) <= self.grace + 60:
            raise JobError(
                f"time={self.time!r} is too short: the job is told to stop {self.grace} s before its end, and up "
                f"to 60 s earlier: ask for more time"
            )
        if self.memory:
            check("memory", self.memory, MEMORY, "a number with K, M, G or T, such as 32G")
        if self.launcher not in ("srun", "torchrun"):
            raise JobError(f"launcher={self.launcher!r}: choose srun (a task per rank) or torchrun (a task per node)")
        check_program(self.program)
        if not isinstance(self.array, (tuple, list)):
            raise JobError(f"array={self.array!r} cannot be used: give a list of values")
        for value in self.array:
            check("array", value, VALUE, "values of letters, digits, dot, plus and dash")
        if any(ARRAY in word for word in self.program) != bool(self.array):
            raise JobError(f"array={self.array!r} and {ARRAY} in the program belong together: give both")


def check(what: str, value: object, pattern: re.Pattern, allowed: str) -> None:
    """Raise JobError unless all of the value is of the pattern."""
    if not (isinstance(value, str) and pattern.fullmatch(value)):
        raise JobError(f"{what}={value!r} cannot be used: give {allowed}")


def check_count(what: str, value: object, least: int) -> None:
    """Raise JobError unless the value is a whole number in the range that a cluster can have."""
    if type(value) is not int or not least <= value <= MOST:
        given = GIVEN.get(what, "")
        raise JobError(f"{what}={value!r} cannot be used: give a whole number, {least} to {MOST}{given}")


def check_program(program: tuple[str, ...]) -> None:
    """Raise JobError unless there is a program, of words that stay what they are when a shell has read them."""
    if not isinstance(program, (tuple, list)) or not program:
        raise JobError(f"program={program!r} cannot be used: give a script and its arguments as a list of words")
    for word in program:
        if not isinstance(word, str) or ODD.search(word):
            raise JobError(f"program: the word {word!r} cannot be used: give text without line breaks and the like")


def seconds(limit: str) -> float:
    """A time limit of Slurm's in seconds."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Without days a single number is minutes, two are minutes:seconds; behind days they are hours, and hours:minutes.
    parts += [0] * ((3 if days or len(parts) == 3 else 2) - len(parts))
    return sum(part * unit for part, unit in zip(reversed(parts), UNITS, strict=False)) + int(days or 0) * UNITS[3]
