"""Scripts under the audit's witnesses, on forked ranks: torch is imported once for all of them."""

from dataclasses import dataclass, field
from pathlib import Path

from real import LIMIT

from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_tools.audit.command import RANKS
from ddp_tools.audit.judge import judge
from ddp_tools.audit.launch import WITNESS
from ddp_tools.audit.notes import Notes, Row, read_notes

AT_ONCE = 3  # scripts
ON_CPU = {"DDP_AUDIT_ON_CPU": "1"}


def start(ranks, words, cwd, notes, limit, env):
    """Start the witnesses of a script, as the command's `launch` does, but on forked ranks."""
    words = (notes, limit, *words)
    return LearnerRun(WITNESS, *words, ranks=ranks, folder=cwd, limit=limit + 30, env=env)


def launch(ranks, words, cwd, notes, limit, env):
    """In the place of the command's `launch`: the notes of the ranks."""
    wait_for_runs(start(ranks, words, cwd, notes, limit, env))
    return read_notes(notes, ranks)


@dataclass
class Script:
    """A script of this text, what it is given, and how it is to run."""

    text: str
    words: list = field(default_factory=list)
    ranks: int = RANKS
    limit: float = LIMIT
    env: dict = field(default_factory=dict)

    def start(self, folder: Path) -> None:
        """Start it in `work` of a folder, which may be there."""
        self.notes = folder / "notes"
        for part in (self.notes, folder / "work"):
            part.mkdir(parents=True, exist_ok=True)
        (script := folder / "it.py").write_text(self.text)
        words = [script, *self.words]
        self.run = start(self.ranks, words, folder / "work", self.notes, self.limit, self.env)

    def ended(self) -> list[Notes]:
        """Wait until it has ended; the notes of each rank."""
        wait_for_runs(self.run)
        return read_notes(self.notes, self.ranks)


def audit_all(scripts: dict[str, Script], home: Path) -> dict[str, list[Notes]]:
    """Run scripts, several at once, each in a folder below this one; the notes of the ranks of each."""
    names = [*scripts]
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        for number, name in enumerate(some, first):
            scripts[name].start(home / str(number))
        wait_for_runs(*(scripts[name].run for name in some))
    return {name: script.ended() for name, script in scripts.items()}


def table(ranks: list[Notes]) -> dict[str, Row]:
    """The rows of the table, by name."""
    return {row.name: row for row in judge(ranks)}
