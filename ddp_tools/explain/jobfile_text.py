"""Read a job file's text: its directives, its commands, and which of them start ranks.

No shell runs. In a command's text a `\\0` stands for a dollar that the batch shell leaves alone, in
single quotes or behind a backslash: the shells of the tasks fill it in.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "o": "output"}
_SHORT |= {"e": "error", "t": "time", "a": "array", "J": "job-name", "D": "chdir", "i": "input"}
_SHORT |= {"A": "account", "p": "partition", "q": "qos", "C": "constraint", "w": "nodelist"}
_SHORT |= {"x": "exclude", "d": "dependency", "b": "begin", "H": "hold", "L": "licenses"}
_SHORT |= {"M": "clusters", "m": "distribution", "W": "wait", "Q": "quiet", "v": "verbose"}
_SHORT |= {"l": "label", "u": "unbuffered", "K": "kill-on-bad-exit", "s": "oversubscribe"}
# Options of srun behind which no value stands, or only one with =.
_FLAGS = {"label", "unbuffered", "kill-on-bad-exit", "quiet", "verbose", "exclusive", "exact"}
_FLAGS |= {"overlap", "oversubscribe", "overcommit", "pty", "multi-prog", "hold", "disable-status"}
_FLAGS |= {"no-container-mount-home", "container-mount-home", "container-writable"}
_OPTION = re.compile(r"(?<!\S)(?:--([\w-]+)(?:=|\s+)?|-([A-Za-z])[= ]*)([^\s-]\S*)?")
_HEREDOC = re.compile(r"(?ms)(?<!<)<<-?[ \t]*['\"\\]?(\w+)['\"]?([^\n]*)\n.*?^[ \t]*\1[ \t]*$")
_TOKEN = re.compile(
    r"""\\\n | \\. | '[^']*' | "(?:\\.|[^"\\])*" | `[^`]*` | (?<![^\s;&|(])\#[^\n]*
    | &&|\|\|?|;|\n|(?<![<>])&(?!>) | . """,
    re.VERBOSE | re.DOTALL,
)
_ENDS = ("\n", ";", "&", "&&", "|", "||")
_ASSIGNS = re.compile(r"\s*(?:(?:then|do|else)\s+)?(?:(?:export|declare|local|readonly)\s|\w+\+?=)")
_ASSIGNED = re.compile(r"(?<!\S)(\w+)(\+?)=(\S*)")
_VALUE_OF = re.compile(r"[$\0](?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
SRUN = re.compile(r"(?:^|[\s;(/])srun\s")
_LAUNCHER = re.compile(
    r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\baccelerate\s+launch\b"
)
_PYTHON = re.compile(
    r"(?:^|[\s;(/])python[\d.]*\s+(?!-c|-V|--v|-m\s+(?:venv|pip)).*?(?:\.py\b|-m\s)", re.S
)
_OTHER = re.compile(r"\b(?:mpirun|mpiexec|horovodrun|deepspeed|ibrun)\s")
_NO_START = re.compile(
    r"\s*(?:(?:then|do|else)\s+)?(?:(?:echo|printf)\b|(?:export\s+)?\w+=\S*\s*$)"
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the batch script: its first line, and its words (a quoted blank is `\\1`)."""

    line: int
    raw: str
    nounset: bool  # `set -u` holds
    end: str  # what stands behind it: a line's end, ;, &, or | and the like
    background: bool = False  # it, or the pipe that it begins, ends with &

    @property
    def text(self) -> str:
        """The command as one reads it."""
        return self.raw.replace("\1", " ")


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts ranks, with variables of the file filled in.

    options: of the job, and over them those of its srun. own: those of srun, and a variable among
        them that the file does not set. facts: what `jobfile.toml` asks for.
    """

    line: int
    text: str
    options: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)

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
        if any(
            name.startswith("ntasks-per-") for name in self.options.keys() - {"ntasks-per-node"}
        ):
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


def options_of(text: str) -> dict[str, str]:
    """Return the options of a directive or of srun; a flag without a value has an empty one."""
    return {
        match[1] or _SHORT.get(match[2], match[2]): match[3] or ""
        for match in _OPTION.finditer(text)
    }


def _srun_options(text: str) -> dict[str, str]:
    """Return the options of a srun, from behind its name to the program that it starts."""
    words = text.split()
    count = 0
    while count < len(words) and words[count].startswith("-"):
        word = words[count]
        long, short = word[2:], _SHORT.get(word[1:2], "")
        flag = (long if word.startswith("--") else short) in _FLAGS
        count += 1 if flag or "=" in word or not (word.startswith("--") or len(word) == 2) else 2
    options = options_of(" ".join(words[:count]))
    if words[count:] and re.match(r"\$\{?\w+(?:\[[@*]\])?\}?$", words[count]):
        options[words[count]] = ""  # it may hold options
    return options


class JobFile:
    """A job file: `lines` as they stand, `directives` that count, `commands` and `starts`."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.dos = "\r\n" in text
        text = text.replace("\r\n", "\n")
        self.lines = text.split("\n")
        # What is handed to another program as its input is no command of this file.
        self.bare = _HEREDOC.sub(lambda here: here[2] + "\n" * here[0].count("\n"), text)
        self.commands = list(_commands(self.bare))
        background = False
        for number, command in reversed(list(enumerate(self.commands))):
            background = command.end == "&" or (background and command.end in ("|", "&&", "||"))
            self.commands[number] = replace(command, background=background)
        first = self.commands[0].line if self.commands else len(self.lines) + 1
        numbered = enumerate(self.bare.split("\n"), start=1)
        ours = [(number, line[7:]) for number, line in numbered if re.match(r"#SBATCH\s", line)]
        self.directives = [
            (number, re.sub(r"\s#.*", "", line)) for number, line in ours if number < first
        ]
        self.late = [number for number, _ in ours if number > first]
        self.options: dict[str, str] = {}
        for _, line in self.directives:
            self.options |= options_of(line)

    @cached_property
    def assigned(self) -> list[tuple[int, str, str, str]]:
        """What variables are set to: the line, the name, a + where it is appended, the value."""
        return [
            (command.line, match[1], match[2], match[3].replace("\1", " "))
            for command in self.commands
            if _ASSIGNS.match(command.raw)
            for match in _ASSIGNED.finditer(command.raw)
        ]

    @cached_property
    def values(self) -> dict[str, str]:
        """The value of each variable that is set to one value only."""
        values: dict[str, str] = {}
        several = set()
        for _, name, more, value in self.assigned:
            if not more and values.get(name, value) != value:
                several.add(name)
            values[name] = f"{values.get(name, '')} {value}" if more else value
        return {name: value.strip("()") for name, value in values.items() if name not in several}

    def filled(self, text: str) -> str:
        """Fill in the variables that the file sets."""
        for _ in range(4):
            text = _VALUE_OF.sub(lambda name: self.values.get(name[1] or name[2], name[0]), text)
        return text

    @cached_property
    def starts(self) -> list[Start]:
        """The commands that start ranks: under srun or by a launcher, else the last Python."""
        starts = []
        for command in self.commands:
            raw = self.filled(command.raw)
            text = raw.replace("\1", " ")
            kinds = {"other": _OTHER, "torchrun": _LAUNCHER, "python": _PYTHON}
            known = [(kind, match) for kind, it in kinds.items() if (match := it.search(text))]
            if known and not _NO_START.match(command.raw):
                kind, program = known[0]
                srun = SRUN.search(text, 0, program.start() + 1)
                own = _srun_options(raw[srun.end() - 1 : program.start()]) if srun else {}
                kept = ("ntasks", "ntasks-per-node") if "ntasks" in own else ()
                job = {name: value for name, value in self.options.items() if name not in kept}
                start = Start(command.line, text, job | own, own)
                start.facts.update({kind, *_facts(start, srun is not None, command.background)})
                starts.append(start)
        ranks = [start for start in starts if start.facts & {"srun", "torchrun", "other"}]
        return ranks or starts[-1:]

    @cached_property
    def facts(self) -> set[str]:
        """The facts of all that starts ranks."""
        facts = {"directives"} if self.directives else set()
        return facts.union(*(start.facts for start in self.starts))

    def script(self, start: Start) -> str | None:
        """Return the text of the script of a start, if it stands where the file says."""
        for name in re.findall(r"[^\s'\"=]+\.py\b", start.text):
            for folder in (Path.cwd(), self.path.parent):
                if (folder / name).is_file():
                    return (folder / name).read_text(encoding="utf-8", errors="replace")
        return None

    def unseen(self) -> Iterator[str]:
        """Yield what a job file needs, and this one was not seen to have."""
        if not self.directives:
            yield "a line #SBATCH that counts. Is it a job file, or is all said to sbatch itself?"
        if not self.starts:
            yield (
                "the command that starts the ranks: no srun with Python, no torchrun and no Python "
                "script is recognised. If it stands in another file, read that one, too."
            )

    def summary(self) -> str:
        """Say in a line what it asks for."""
        count = f"{len(self.directives)} directives"
        for start in self.starts[-1:]:
            names = {"nodes": start.nodes, "tasks a node": start.tasks, "GPUs a node": start.gpus}
            asked = ", ".join(f"{name}: {'?' if n is None else n}" for name, n in names.items())
            launcher = [
                name for name in ("srun", "torchrun", "python", "other") if name in start.facts
            ]
            return f"{count}; {asked}; line {start.line} starts ranks ({' '.join(launcher)})"
        return count


def _facts(start: Start, srun: bool, background: bool) -> Iterator[str]:
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


def _commands(text: str) -> Iterator[Command]:
    """Yield the commands of a shell script, split where no quote and no bracket is open."""
    line, first, depth, nounset = 1, 1, 0, False
    words: list[str] = []
    for token in (match[0] for match in _TOKEN.finditer(text + "\n")):
        if not words:
            first = line
        line += token.count("\n")
        if depth == 0 and token in _ENDS:
            if words:
                raw = "".join(words)
                if option := re.match(r"set\s+([-+])(?:\w*u|o\s+nounset)", raw):
                    nounset = option[1] == "-"
                yield Command(first, raw, nounset, token)
            words = []
        elif (token[0] != "#" or len(token) == 1) and (words or token.strip(" \t\n\\")):
            depth = max(0, depth + (token == "(") - (token == ")"))
            words.append(_plain(token, depth > 0))


def _plain(token: str, inside: bool) -> str:
    """Take the quotes from a token; a blank in them, or in brackets, ends no word."""
    if token == "\\\n":
        return " "
    if token[0] == "\\":
        return token[1].replace("$", "\0")
    if token[0] == "'" and len(token) > 1:
        token = token[1:-1].replace("$", "\0")
    elif token[0] == '"' and len(token) > 1:
        token = token[1:-1].replace("\\$", "\0").replace("\\\n", " ").replace('\\"', '"')
    elif not (inside or token[0] == "`"):
        return token
    return re.sub(r"[ \t\n]", "\1", token)
