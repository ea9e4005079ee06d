"""The hang lab: run a script with one planted fault, show its evidence, check an answer.

Notebook 10 makes a `Lab`, and the command `hang` calls `play`, in the driver process; the
three ranks of a run are started here, by `PlantedRun`.
"""

import json
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_helpers import ROOT
from ddp_helpers.lessons.break_it_and_fix_it.evidence import Evidence
from ddp_helpers.lessons.break_it_and_fix_it.mutations import (
    FIXES,
    KINDS,
    RANKS,
    Plant,
    choose_plant,
)
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_tools import PlainError, watched

# The evidence to look at: methods of `Evidence`. R is the number of a rank, N of a line.
EVIDENCE = ("exits", "who_hangs", "log R", "stack R", "lines N")
_REQUEST = "|".join(EVIDENCE).replace("R", f"[0-{RANKS - 1}]").replace("N", "[0-9]{1,4}")
_ANSWER = r"rank=([0-9]{1,4}) line=([0-9]{1,4}) kind=(\S+) fix=(\S+)"
# Seconds without output that count as a hang, and until the run is ended; gloo's timeout in
# train.py is 8.
QUIET, LIMIT = 4.0, 16.0


class PlantedRun(LearnerRun):
    """The run of a planted script, whose ranks write stacks and recorders while it hangs."""

    def __init__(self, planted: Plant, folder: Path) -> None:
        """Write the script into a folder, emptied first, and start its ranks there."""
        shutil.rmtree(folder, ignore_errors=True)
        planted.write(folder)
        self._was_asked = False
        script = Path(watched.__file__)
        super().__init__(script, "train.py", ranks=RANKS, limit=LIMIT, folder=folder)

    def is_over(self) -> bool:
        """Whether all ranks have ended, and their evidence is kept; ask those that hang."""
        if super().is_over():
            self._keep()
            return True
        logs = [log.stat() for log in self.logs]
        is_quiet = time.time() > max(log.st_mtime for log in logs) + QUIET
        hangs = all(log.st_size for log in logs) and (is_quiet or any(self.exit_statuses))
        if hangs and not self._was_asked:
            self._was_asked = True
            self._ask()
        return False

    def _keep(self) -> None:
        """Write exit statuses and logs into the run's folder."""
        for rank in range(RANKS):
            lines = "\n".join([*self.lines_of_rank(rank), ""])
            (self.folder / f"log_rank{rank}.txt").write_text(lines)
        (self.folder / "exits.json").write_text(json.dumps(self.exit_statuses))

    def _ask(self) -> None:
        """Ask each rank that is there for its recorder, its stacks and its loader worker's."""
        for process_id in self.process_ids:
            with suppress(psutil.Error):
                process = psutil.Process(process_id)
                for member in (process, *process.children(recursive=True)):
                    member.send_signal(signal.SIGUSR1)
                    time.sleep(0.05)  # they write into one file
                process.send_signal(signal.SIGUSR2)


class Lab:
    """A run with a planted fault, its evidence, and the checker of answers."""

    def __init__(self, seed: int) -> None:
        """Run the fault of a seed to its end, up to 20 s; or use the run of it that is kept."""
        self.seed, self.plant = seed, choose_plant(seed)
        self.folder = ROOT / "build" / "hang" / f"seed{seed}"
        script, exits = self.folder / "train.py", self.folder / "exits.json"
        if not exits.exists() or script.read_text() != self.plant.mutation.text():
            wait_for_runs(PlantedRun(self.plant, self.folder))
        self.evidence = Evidence(self.folder)

    def look(self, request: str) -> str:
        """Return a piece of evidence.

        request: a name in EVIDENCE, with the number of a rank or a line in place of R or N.
        Raises PlainError for any other.
        """
        if not re.fullmatch(_REQUEST, request):
            choices = f"choose one of {', '.join(EVIDENCE)} (R a rank, 0 to {RANKS - 1}; N a line)"
            raise PlainError(f"no evidence is called {request!r}: {choices}")
        name, *numbers = request.split()
        return getattr(self.evidence, name)(*map(int, numbers))

    def answer(self, rank: int, line: int, kind: str, fix: str) -> str:
        """Check an answer, in one line; a line next to the fault also counts as right.

        Raises PlainError for a kind or a fix that is not known.
        """
        for word, known in ((kind, KINDS), (fix, FIXES)):
            if word not in known:
                raise PlainError(f"{word!r} is not known: choose one of {', '.join(known)}")
        fault = self.plant.mutation
        if rank != self.plant.rank:
            reason = "it waits for another rank, or a fault of another rank ended it"
            return f"not yet: rank {rank} is not at fault: {reason}"
        if not any(abs(line - changed) <= 1 for changed in fault.lines()):
            reason = "is not where it departs from the others: what leads there?"
            return f"not yet: the rank is right, but line {line} {reason}"
        if kind != fault.kind:
            return f"not yet: rank and line are right, but not that {KINDS[kind].description}"
        if fix != KINDS[kind].fix:
            return f"not yet: all but the fix is right: {FIXES[fix]} would not help"
        return "right"


def play(seed: int, request: list[str], answer: list[str]) -> int:
    """Run a seed, or show a piece of its evidence, or check an answer, and print the result.

    request: the words after --look; answer: the words after --answer; if both are empty, print the
    choices. Returns the exit status, 1 for a wrong answer. Raises PlainError for an unknown word.
    """
    lab = Lab(seed)
    if request:
        print(lab.look(" ".join(request)))
        return 0
    if not answer:
        _print_rules(lab)
        return 0
    match = re.fullmatch(_ANSWER, " ".join(answer))
    if not match:
        form = "rank=… line=… kind=… fix=…, in this order"
        raise PlainError(f"the answer {' '.join(answer)!r} is not {form}")
    rank, line, kind, fix = match.groups()
    verdict = lab.answer(int(rank), int(line), kind, fix)
    print(verdict)
    return int(verdict != "right")


def _print_rules(lab: Lab) -> None:
    """Print the choices of evidence and of answers."""
    folder = lab.folder.relative_to(ROOT)
    command = f"hang --seed {lab.seed}"
    descriptions = {kind: KINDS[kind].description for kind in KINDS}
    run = f"three ranks ran {folder}/train.py, with one planted fault"
    print(f"{run}; the evidence (R a rank, N a line):\n  {', '.join(EVIDENCE)}")
    for title, texts in (("kinds", descriptions), ("fixes", FIXES)):
        print(f"{title}:")
        for name, text in texts.items():
            print(f"  {name:9} {text}")
    print(f"then: {command} --look log 1; {command} --answer rank=0 line=1 kind=… fix=…")
    branch = "where the rank takes a different path from the others, such as an if"
    print(f"line: {branch}; a line next to it also counts")
