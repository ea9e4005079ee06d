"""The hang lab: run a script with one planted fault, show its evidence, judge an answer.

Notebook 10 makes a `Lab`, and the command `hang` calls `play`, in the learner's process; the
three ranks of a run are started here, by `PlantedRun`.
"""

import json
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ddp_helpers import ROOT, PlainError
from ddp_helpers.lessons.break_it_and_fix_it.evidence import Evidence
from ddp_helpers.lessons.break_it_and_fix_it.mutations import (
    CURES,
    KINDS,
    RANKS,
    Plant,
    choose_plant,
)
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_tools import watched

# What can be looked at: methods of `Evidence`. R stands for the number of a rank, N for a line's.
EVIDENCE = ("exits", "log R", "logs", "who_hangs", "recorder R", "stack R", "lines N", "script")
# Seconds without output after which a run hangs, and until it is ended; gloo's timeout in
# train.py is 8.
QUIET, LIMIT = 4.0, 16.0


class PlantedRun(LearnerRun):
    """The run of a planted script, whose ranks write stacks and recorders while it hangs."""

    def __init__(self, planted: Plant, folder: Path) -> None:
        """Write the script into a folder, and start its ranks there.

        Raises PlainError where the folder holds something else than a run of the lab.
        """
        if any(folder.glob("*")) and not (folder / "parts").is_dir():
            message = f"{folder} holds something else than a run of the lab: give another folder"
            raise PlainError(message)
        shutil.rmtree(folder, ignore_errors=True)
        planted.write(folder)
        self._log_sizes: list[int] = []
        self._last_output = time.monotonic()
        self._signalled = False
        script = Path(watched.__file__)
        super().__init__(script, "train.py", ranks=RANKS, limit=LIMIT, folder=folder)

    def is_over(self) -> bool:
        """Whether all ranks have ended, and their evidence is kept."""
        sizes = [log.stat().st_size for log in self.logs]
        if sizes != self._log_sizes:
            self._log_sizes = sizes
            self._last_output = time.monotonic()
        if super().is_over():
            self._keep()
            return True
        hangs = any(self.exit_statuses) or time.monotonic() > self._last_output + QUIET
        if hangs and all(sizes) and not self._signalled:
            self._signalled = True
            self.ask()
        return False

    def _keep(self) -> None:
        """Write exit statuses and logs into the run's folder."""
        (self.folder / "exits.json").write_text(json.dumps(self.exit_statuses))
        for rank in range(RANKS):
            lines = "\n".join([*self.lines_of_rank(rank), ""])
            (self.folder / f"log_rank{rank}.txt").write_text(lines)

    def ask(self) -> None:
        """Ask each rank that is there for its recorder, its stacks and its loader worker's."""
        for process_id in self.process_ids:
            with suppress(psutil.Error):
                process = psutil.Process(process_id)
                for member in (process, *process.children(recursive=True)):
                    member.send_signal(signal.SIGUSR1)
                    time.sleep(0.05)  # they write into one file
                process.send_signal(signal.SIGUSR2)


class Lab:
    """A run with a planted fault, its evidence, and the judge of answers."""

    def __init__(self, seed: int, folder: Path | None = None, go_on: bool = False) -> None:
        """Run the fault of a seed to its end, up to 20 s. go_on: use the run that is in the folder.

        Raises PlainError for a bad seed, a folder in use, or a run that is not there.
        """
        if not 0 <= seed < 2**31:
            raise PlainError(f"the seed is {seed}: give a number from 0 to {2**31 - 1}")
        self.seed = seed
        self.plant = choose_plant(seed)
        self.folder = folder or _folder_of(seed)
        if not go_on:
            wait_for_runs(PlantedRun(self.plant, self.folder))
        elif not (self.folder / "exits.json").exists():
            command = f"ddp-course hang --seed {seed}"
            raise PlainError(f"seed {seed} has not been run: {command}")
        self._evidence = Evidence(self.folder)

    @property
    def source(self) -> list[str]:
        """The lines of the planted script."""
        return self._evidence.source

    def look(self, request: str) -> str:
        """Return a piece of evidence.

        request: a name in EVIDENCE, with the number of a rank or a line in the place of R or N.
        Raises PlainError for any other.
        """
        name, *numbers = request.split() or [""]
        takes = {piece.split()[0]: piece.split()[1:] for piece in EVIDENCE}
        known = name in takes and len(takes[name]) == len(numbers)
        if not known or not all(map(_is_short_number, numbers)):
            choices = f"choose one of {', '.join(EVIDENCE)} (R a rank, N a line)"
            raise PlainError(f"no evidence is called {request!r}: {choices}")
        for number, kind in zip(map(int, numbers), takes[name], strict=True):
            if kind == "R" and number >= RANKS:
                raise PlainError(f"there is no rank {number}: the ranks are 0 to {RANKS - 1}")
            if kind == "N" and not 1 <= number <= len(self.source):
                raise PlainError(f"there is no line {number}: the script has {len(self.source)}")
        return getattr(self._evidence, name)(*map(int, numbers))

    def answer(self, rank: int, line: int, kind: str, cure: str) -> str:
        """Judge an answer, in one line; a line beside the fault is right, too.

        Raises PlainError for a kind or a cure that is not known.
        """
        if kind not in KINDS:
            raise PlainError(f"{kind!r} is not known: choose one of {', '.join(KINDS)}")
        if cure not in CURES:
            raise PlainError(f"{cure!r} is not known: choose one of {', '.join(CURES)}")
        mistake = self._mistake(rank, line, kind, cure)
        return f"not yet: {mistake}" if mistake else "right"

    def _mistake(self, rank: int, line: int, kind: str, cure: str) -> str:
        """Return the first thing that is wrong in an answer; empty, if it is right."""
        fault = self.plant.mutation
        if rank != self.plant.rank:
            reason = "it waits for another, or was ended by what another did"
            return f"rank {rank} is not at fault: {reason}"
        if not any(abs(line - changed) <= 1 for changed in fault.lines()):
            reason = "is not what makes it part from the others: what leads there?"
            return f"the rank is right, but line {line} {reason}"
        if kind != fault.kind:
            return f"rank and line are right, but not that {KINDS[kind].description}"
        if cure != KINDS[kind].cure:
            return f"all but the cure is right: {CURES[cure]} would not help"
        return ""


def _is_short_number(word: str) -> bool:
    """Whether a word is one to four digits."""
    return bool(re.fullmatch(r"\d{1,4}", word, re.ASCII))


def _folder_of(seed: int) -> Path:
    """Return the folder where the run of a seed lies."""
    return ROOT / "build" / "hang" / f"seed{seed}"


def _was_run(seed: int) -> bool:
    """Whether the folder of a seed holds an ended run of the script that it plants."""
    folder = _folder_of(seed)
    if not (folder / "exits.json").exists():
        return False
    try:
        return (folder / "train.py").read_text() == choose_plant(seed).mutation.text()
    except OSError:
        return False


class _Answer(NamedTuple):
    """An answer on the command line."""

    rank: int
    line: int
    kind: str
    cure: str


def _parsed_answer(words: list[str]) -> _Answer:
    """Read rank=… line=… kind=… cure=…, in any order. Raises PlainError for anything else."""
    values = dict(word.partition("=")[::2] for word in words)
    complete = values.keys() == set(_Answer._fields)
    if not complete or not (values["rank"].isdecimal() and values["line"].isdecimal()):
        raise PlainError(f"the answer {' '.join(words)!r} is not rank=… line=… kind=… cure=…")
    rank, line = int(values["rank"]), int(values["line"])
    return _Answer(rank, line, values["kind"], values["cure"])


def play(seed: int, request: list[str], answer: list[str]) -> int:
    """Run a seed, or look at a piece of its evidence, or judge an answer, and print the result.

    request: the words behind --look; answer: those behind --answer; both empty to run the seed.
    Returns the exit status, 1 for a wrong answer. Raises PlainError for what is none.
    """
    lab = Lab(seed, go_on=bool(request or answer) or _was_run(seed))
    if request:
        print(lab.look(" ".join(request)))
        return 0
    if answer:
        verdict = lab.answer(*_parsed_answer(answer))
        print(verdict)
        return int(verdict != "right")
    _print_rules(lab)
    return 0


def _print_rules(lab: Lab) -> None:
    """Print what can be looked at and answered."""
    folder = lab.folder.relative_to(ROOT)
    command = f"hang --seed {lab.seed}"
    descriptions = {kind: KINDS[kind].description for kind in KINDS}
    run = f"three ranks ran {folder}/train.py, which one fault was planted into"
    print(f"{run}; the evidence (R a rank, N a line):\n  {', '.join(EVIDENCE)}")
    for title, texts in (("kinds", descriptions), ("cures", CURES)):
        print(f"{title}:")
        for name, text in texts.items():
            print(f"  {name:9} {text}")
    print(f"then: {command} --look log 1; {command} --answer rank=0 line=1 kind=… cure=…")
    branch = "where the rank takes another way than the others, such as an if"
    print(f"line: {branch}; a line beside it counts, too")
