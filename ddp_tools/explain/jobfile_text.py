"""Read a job file's text: its directives, its commands, and which of them start ranks."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ddp_tools.explain.jobfile_shell import HEREDOC, Command, read_blocks, read_commands, spaced
from ddp_tools.explain.jobfile_start import (
    Start,
    facts_of,
    options_of,
    srun_options,
    without_brackets,
    wrapper_of,
)

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
_HELPER = re.compile(  # it starts no ranks
    r"(?=[^;]*\Z|(?!\S*sh\s))(?:\S*sh -l?c )?(?:\S*/)?(?:hostname|nvidia-smi|printenv|echo|date"
    r"|sleep|ls|cat|df|free|mkdir|rm|cp|mv|rsync|tar|unzip|touch|pip3?|wget|curl|git"
    r"|python[\d.]* -[cVh-])(?!\w)"
)
# A variable that the file does not set, in front of a launcher's script, and no option's value.
_MAY_HOLD = re.compile(r"(--[\w-]+)?\s+(\$\{?\w+(?:\[[@*]\])?\}?)(?=\s)")
_SCRIPT = re.compile(r"\s*(?:(?:time|exec)\s+)?(?:(?:ba|z)?sh\s+)?[^\s=(]+\.sh\b")
# A program's folder, whose name may have a space.
_PATH = re.compile(r"(?:^|(?<=\s))/\S*/(?=python|$)")
_NO_START = re.compile(
    r"\s*(?:(?:then|do|else)\s+)?(?:(?:echo|printf)\b|(?:export\s+)?\w+=\S*\s*$)"
)


class JobFile:
    """A job file: `lines` as they stand, `directives` that count, `commands` and `starts`."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.dos = "\r\n" in text
        text = text.replace("\r\n", "\n")
        self.lines = text.split("\n")
        # What is handed to another program as its input is no command of this file.
        self.bare = HEREDOC.sub(lambda here: here[2] + "\n" * here[0].count("\n"), text)
        self.commands = list(read_commands(self.bare))
        background = False
        for number, command in reversed(list(enumerate(self.commands))):
            background = command.end == "&" or (background and command.end in ("|", "&&", "||"))
            self.commands[number] = replace(command, background=background)
        self.blocks = list(read_blocks(self.commands))
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
            (command.line, match[1], match[2], spaced(match[3]))
            for command in self.commands
            if _ASSIGNS.match(command.raw)
            for match in _ASSIGNED.finditer(command.raw)
        ]

    @cached_property
    def values(self) -> dict[str, str]:
        """The value of each variable that is a count of Slurm, or is set to one value only."""
        job = Start(0, "", self.options)
        every = job.nodes and job.tasks and job.nodes * job.tasks
        counts = {"NNODES": job.nodes, "JOB_NUM_NODES": job.nodes, "GPUS_ON_NODE": job.gpus}
        counts |= {"NTASKS": every, "NPROCS": every, "NTASKS_PER_NODE": job.tasks}
        ours = {name for _, name, _, _ in self.assigned}
        values = {f"SLURM_{name}": str(count) for name, count in counts.items() if count}
        values = {name: value for name, value in values.items() if name not in ours}
        several = set()
        for _, name, more, value in self.assigned:
            value = value[1:-1] if re.fullmatch(r"\(.*\)", value, re.S) else value
            if not more and values.get(name, value) != value:
                several.add(name)
            values[name] = f"{values.get(name, '')} {value}" if more else value
        return {name: value for name, value in values.items() if name not in several}

    def filled(self, text: str) -> str:
        """Fill in the variables that the file sets; a space in a path ends no word."""

        def value(name: re.Match) -> str:
            known = self.values.get(name[1] or name[2], name[0])
            return known.replace(" ", "\1") if known.startswith("/") else known

        for _ in range(4):
            text = _VALUE_OF.sub(value, text)
        return text

    @cached_property
    def _recognised(self) -> list[Start]:
        """The commands that start Python or a launcher, in which variables are filled in."""
        starts = []
        for command in self.commands:
            raw = self.filled(command.raw)
            text = spaced(raw)
            kinds = {"other": _OTHER, "torchrun": _LAUNCHER, "python": _PYTHON}
            known = [(kind, match) for kind, it in kinds.items() if (match := it.search(text))]
            if known and not _NO_START.match(command.raw):
                kind, program = known[0]
                srun = SRUN.search(text, 0, program.start() + 1)
                first = srun.end() - 1 if srun else 0
                own, end = srun_options(raw[first : program.start()]) if srun else ({}, 0)
                kept = ("ntasks", "ntasks-per-node") if "ntasks" in own else ()
                job = {name: value for name, value in self.options.items() if name not in kept}
                if kind == "torchrun":
                    said = without_brackets(text[program.end() :]).partition(".py")[0]
                    own |= {it[2]: "" for it in _MAY_HOLD.finditer(said) if not it[1]}
                place = program.start() - first - end
                rest = raw[first + end :]
                before = _PATH.sub(lambda it: it[0].replace("\1", "_"), rest[: place + 1])
                behind = spaced(before + rest[place + 1 :], ";")
                wrapper = wrapper_of(behind, place)
                start = Start(command.line, text, job | own, own, wrapper=wrapper)
                start.facts.update({kind, *facts_of(start, srun is not None, command.background)})
                starts.append(start)
        return starts

    @cached_property
    def _unknown(self) -> list[Command]:
        """The commands that may start ranks, and of which nothing is recognised."""
        unknown = []
        lines = {start.line for start in self._recognised}
        for command in (it for it in self.commands if it.line not in lines):
            if srun := SRUN.search(command.text):
                behind = spaced(command.raw, ";")[srun.end() - 1 :]
                unknown += [] if _HELPER.match(behind, srun_options(behind)[1]) else [command]
            elif _SCRIPT.match(command.text):
                unknown.append(command)
        return unknown

    @cached_property
    def starts(self) -> list[Start]:
        """The commands that start ranks: under srun or by a launcher, else the last Python."""
        ranks = [it for it in self._recognised if it.facts & {"srun", "torchrun", "other"}]
        return ranks or ([] if self._unknown else self._recognised[-1:])

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
        for command in self._unknown:
            shown = " ".join(command.text.split())[:60]
            yield f"what `{shown}` in line {command.line} starts: no check reads it."
        for start in self.starts:
            for name in (name for name, count in start.counts.items() if count is None):
                yield f"how many {name} line {start.line} has: no plain number says it."

    def summary(self) -> str:
        """Say in a line what it asks for."""
        count = f"{len(self.directives)} directives"
        for start in self.starts[-1:]:
            counts = start.counts.items()
            asked = ", ".join(f"{name}: {'?' if n is None else n}" for name, n in counts)
            launcher = [
                name for name in ("srun", "torchrun", "python", "other") if name in start.facts
            ]
            return f"{count}; {asked}; line {start.line} starts ranks ({' '.join(launcher)})"
        return count
