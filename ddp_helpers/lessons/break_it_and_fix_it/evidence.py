"""The evidence of a hang-lab run: exit statuses, logs, recorders, stacks, the script's lines.

`hang.Lab` shows it. It reads the files of a run that has ended, in the driver process.
"""

import json
import re
from pathlib import Path

from ddp_helpers.launch.processes import exit_text
from ddp_helpers.lessons.run_script import LINE_WIDTH
from ddp_tools import who_hangs

_AROUND = 5  # lines before and after the one that is asked for
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')  # as faulthandler writes it
_SCRIPT_FRAME = re.compile(r'\s+File "[^"]*\btrain\.py"')  # as in a traceback
_LOADER_WORKER = "in _worker_loop"


class Evidence:
    """The files of a run; each method returns a piece of them as text."""

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

    def who_hangs(self) -> str:
        """Return what the flight recorders of all ranks show together."""
        paths = [*self.folder.glob("recorder_rank*.json")]
        if not paths:
            return "no rank left a dump"
        return "\n".join(who_hangs.who_hangs(who_hangs.read_dumps(paths)))

    def stack(self, rank: int) -> str:
        """Return where a rank and its loader worker were: lines of the script, innermost first."""
        text = (self.folder / f"stacks_rank{rank}.txt").read_text()
        lines = []
        for thread in re.split(r"\n\s*\n", text):
            lines += self._thread(rank, thread)
        return "\n".join(lines) or f"rank {rank} had ended before its stack was taken"

    def _thread(self, rank: int, thread: str) -> list[str]:
        """List where a thread was; nothing, unless it runs the script or loads data."""
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
        """Return eleven lines of the script around this one, or the script's last lines."""
        number = min(number, len(self.source))
        numbered = [f"{each:3} {line}" for each, line in enumerate(self.source, 1)]
        return "\n".join(numbered[max(0, number - 1 - _AROUND) : number + _AROUND])
