"""A command of a job file that starts ranks: what it asks for, and what gets its signals."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_OPTION = re.compile(r"(?<!\S)(?:--([\w-]+)(?:=|\s+)?|-([A-Za-z])[= ]*)([^\s-]\S*)?")
# What gives its place, and the signals to it, to the program behind it: an assignment, `exec`,
# `env` and the like, Python before -m, and a shell that ends with `exec`, or a bash of one command.
_PROGRAM_ASIDE = r"(?:\S*/)?(?:env|nice|numactl|taskset|stdbuf)\s+(?:-\S+\s+(?:\d\S*\s+)?)*"
_ASIDE = rf"(?:exec\s+|\w+=\S*\s+|{_PROGRAM_ASIDE})*"
_STEPS_ASIDE = re.compile(
    rf"\s*{_ASIDE}(?:(?P<shell>\S*sh)\s+-l?c\s+"
    rf"(?P<last>.*\bexec\s+(?:\"\0@\"\s+\S+\s+)?)?{_ASIDE})?"
    r"(?:\S*python[\d.]*\s+(?:-\w+\s+)*)?\S*\Z",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts ranks, with variables of the file filled in.

    options: of the job, and over them those of its srun. own: those of srun, and a variable among
        them that the file does not set. facts: what `jobfile.toml` asks for. wrapper: what gets a
        signal to the task in place of the program; "" if the program does.
    """

    line: int
    text: str
    options: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)
    wrapper: str = ""

    def number(self, name: str) -> int | None:
        """Return a count that was asked for; None if it is not, or no plain number."""
        value = self.options.get(name, "")
        return int(value) if value.isdecimal() else None

    @property
    def nodes(self) -> int | None:
        """How many nodes it has; None where that is not plain."""
        return self.number("nodes") if "nodes" in self.options else 1

    @property
    def tasks(self) -> int | None:
        """How many tasks each node has; None where that is not plain."""
        asked = {name for name in self.options if name.startswith("ntasks-per-")}
        if "ntasks-per-gpu" in asked and "gpus-per-task" not in self.options:
            each = self.number("ntasks-per-gpu")  # it counts also where srun has --ntasks
            return each * self.gpus if each and self.gpus else None
        if asked - {"ntasks-per-node"}:
            return None
        if "ntasks-per-node" in self.options:
            return self.number("ntasks-per-node")
        if "ntasks" not in self.options or not self.nodes:
            return 1 if "ntasks" not in self.options else None
        count = self.number("ntasks")
        return count and -(-count // self.nodes)

    @property
    def gpus(self) -> int | None:
        """How many GPUs each node has; 0 if none are asked for, None where that is not plain."""
        for name in ("gpus-per-node", "gres", "gpus", "gpus-per-task"):
            value = self.options.get(name, "")
            if name == "gres" and "gpu" not in value:
                continue
            if value:
                match = re.search(r"(?:^|gpu:|:)(?:[a-zA-Z][\w.-]*:)?(\d+)(?=$|[,(])", value)
                count = int(match[1]) if match else 1 if value == "gpu" else None
                if count and name == "gpus":
                    return count // self.nodes if self.nodes else None
                return count and count * (self.tasks or 1) if name == "gpus-per-task" else count
        return 0

    @property
    def counts(self) -> dict[str, int | None]:
        """What it has, by its name in the report."""
        return {"nodes": self.nodes, "tasks per node": self.tasks, "GPUs per node": self.gpus}


@cache
def table() -> dict[str, Any]:
    """Read jobfile.toml: the options that are known, and the faults."""
    text = Path(__file__).with_name("jobfile.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def options_of(text: str) -> dict[str, str]:
    """Return the options of a directive or of srun; a flag without a value has an empty one."""
    return {
        match[1] or table()["short"].get(match[2], match[2]): match[3] or ""
        for match in _OPTION.finditer(text)
    }


def srun_options(text: str) -> tuple[dict[str, str], int]:
    """Return the options of a srun, of which the text is what follows; and where they end."""
    words = list(re.finditer(r"\S+", text))
    count, unset = 0, []
    while words[count:]:
        word = words[count][0]
        variable = re.fullmatch(r"\$\{?\w+(?:\[[@*]\])?\}?", word)  # it may hold options
        if not variable and not word.startswith("-"):
            break
        long, short = word[2:], table()["short"].get(word[1:2], "")
        flag = (long if word.startswith("--") else short) in table()["flags"]
        alone = variable or flag or "=" in word or not (word.startswith("--") or len(word) == 2)
        count += 1 if alone else 2
        unset += [word] if variable else []
    options = options_of(" ".join(word[0] for word in words[:count]))
    return options | dict.fromkeys(unset, ""), words[count].start() if words[count:] else len(text)


def without_brackets(text: str) -> str:
    """Leave out what stands in brackets, such as other commands."""
    while (less := re.sub(r"\$?\([^()]*\)", "", text)) != text:
        text = less
    return text


def wrapper_of(text: str, program: int) -> str:
    """Return what gets the signals of a task in place of the program, which begins there."""
    before = text[: program + 1]
    if aside := _STEPS_ASIDE.match(before):
        alone = not re.search(r"[;|]|(?<!>)&(?!>)", without_brackets(text).strip(" ;"))
        if not aside["shell"] or aside["last"] or (alone and aside["shell"].endswith("bash")):
            return ""
    return before.split()[0]


def facts_of(start: Start, srun: bool, background: bool) -> Iterator[str]:
    """Yield the facts of a start, besides its launcher."""
    nodes, tasks, gpus = start.nodes or 1, start.tasks or 1, start.gpus or 0
    told = {
        "srun": srun,
        "background": background,
        "several nodes": nodes > 1,
        "several tasks": nodes * tasks > 1,
        "tasks on a node": tasks > 1,
        "one task asked": start.own.get("ntasks") == "1",
        "several gpus": gpus > 1,
        "cpus asked": (start.number("cpus-per-task") or 1) > 1,
        "cpus handed on": "cpus-per-task" in start.own,
        "gpus-per-task": "gpus-per-task" in start.options,
        "tasks per node asked": "ntasks-per-node" in start.options,
        "tasks asked": (start.number("ntasks") or 0) > nodes,
    }
    yield from (name for name, holds in told.items() if holds)
