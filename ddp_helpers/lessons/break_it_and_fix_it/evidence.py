"""What a run of the hang lab leaves: exit statuses, logs, recorders, stacks, the script.

`hang.Lab` shows it. It reads the files of a run that has ended, in the learner's process.
"""

import json
import re
from pathlib import Path

from ddp_helpers.launch.processes import exit_text
from ddp_helpers.lessons.break_it_and_fix_it.mutations import RANKS
from ddp_helpers.lessons.run_script import LINE_WIDTH
from ddp_tools import who_hangs

_CALLS = 8  # of a recorder, that are shown: the last ones
_AROUND = 5  # lines before and after the one that is asked for
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')  # as faulthandler writes it
_SCRIPT_FRAME = re.compile(r'\s+File "[^"]*\btrain\.py"')  # as in a traceback
_LOADER_WORKER = "in _worker_loop"


class Evidence:
    """The files of a run, each method of which returns a piece of them as text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = (folder / "train.py").read_text().splitlines()

    def exits(self) -> str:
        """Return how each rank ended."""
        statuses = json.loads((self.folder / "exits.json").read_text())
        return "\n".join(
            f"rank {rank}: {exit_text(status)}" for rank, status in enumerate(statuses)
        )

    def log(self, rank: int) -> str:
        """Return what a rank printed; of a traceback, the frames of the script."""
        lines = (self.folder / f"log_rank{rank}.txt").read_text().splitlines()
        kept = []
        for before, line in zip(["", *lines], lines, strict=False):
            of_script = _SCRIPT_FRAME.match(line) or _SCRIPT_FRAME.match(before)
            if line and (not line[0].isspace() or of_script or "what():" in line):
                kept.append(line if len(line) <= LINE_WIDTH else f"{line[:LINE_WIDTH]} …")
        return "\n".join(f"rank {rank}: {line}" for line in kept)

    def logs(self) -> str:
        """Return what all ranks printed."""
        return "\n".join(map(self.log, range(RANKS)))

    def who_hangs(self) -> str:
        """Return what the recorders of all ranks say together."""
        paths = [*self.folder.glob("recorder_rank*.json")]
        if not paths:
            return "no rank left a dump"
        return "\n".join(who_hangs.who_hangs(who_hangs.read_dumps(paths)))

    def recorder(self, rank: int) -> str:
        """Return the last calls in a rank's recorder."""
        path = self.folder / f"recorder_rank{rank}.json"
        if not path.exists():
            return f"rank {rank} left no dump"
        groups = who_hangs.calls(json.loads(path.read_text()))
        calls = [
            f"group {group}, collective {number}: {call}"
            for group, numbered in groups.items()
            for number, call in numbered.items()
        ]
        return "\n".join(calls[-_CALLS:])

    def stack(self, rank: int) -> str:
        """Return where a rank and its loader worker stood: lines of the script, innermost first."""
        text = (self.folder / f"stacks_rank{rank}.txt").read_text()
        lines = []
        for thread in re.split(r"\n\s*\n", text):
            lines += self._thread(rank, thread)
        return "\n".join(lines) or f"rank {rank} had ended before anybody could look"

    def _thread(self, rank: int, thread: str) -> list[str]:
        """List where a thread stood; nothing, unless it runs the script or loads data."""
        frames = _FRAME.findall(thread.partition(_LOADER_WORKER)[0])
        in_script = [
            f"  line {number} in {function}: {self.source[int(number) - 1].strip()}"
            for file, number, function in frames
            if Path(file).name == "train.py"
        ]
        is_worker = _LOADER_WORKER in thread
        if not in_script and not is_worker:
            return []
        heading = f"rank {rank}, its loader worker:" if is_worker else f"rank {rank}:"
        if in_script:
            return [heading, *in_script]
        file, _, function = frames[0]
        return [heading, f"  in {function} of {Path(file).name}"]

    def lines(self, number: int) -> str:
        """Return eleven lines of the script, this one in the middle; lines count from 1."""
        first = max(1, number - _AROUND)
        last = min(len(self.source), number + _AROUND)
        return self._numbered(range(first, last + 1))

    def script(self) -> str:
        """Return the whole script."""
        return self._numbered(range(1, len(self.source) + 1))

    def _numbered(self, numbers: range) -> str:
        """Return these lines of the script, each behind its number."""
        return "\n".join(f"{number:3} {self.source[number - 1]}" for number in numbers)
