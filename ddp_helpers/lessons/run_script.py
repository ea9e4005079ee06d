"""Run a learner's script on ranks, record what they print and do, and report what went wrong.

The driver process calls it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_helpers.launch.forked_script import LIMIT, ForkedScript, wait_for_runs
from ddp_helpers.launch.processes import exit_text

if TYPE_CHECKING:
    from ddp_helpers.lessons.script_notes import RankNotes

__all__ = [
    "LIMIT",
    "LINE_WIDTH",
    "MOST_LINES",
    "WEIGHT_TOLERANCE",
    "LearnerRun",
    "telling_lines",
    "wait_for_runs",
    "weight_distance",
]

WEIGHT_TOLERANCE = (
    1e-4  # weights that differ by less are equal, to the rounding of some steps in float32
)
LINE_WIDTH, MOST_LINES = 240, 7  # characters of a line, and lines of a rank, that are shown

# Lines that tell nothing: the frames of Python and of C++, and the lines around them.
NOISE = re.compile(
    r"\s(?! what)|$|Traceback|frame #|<omitting|Exception raised|Thread 0x|The above|During"
    r"|terminate c"
    r"|\S+ UserWarning: (Detected an existing|torch\.distributed is) "  # DCP's
)
# A frame as faulthandler writes it.
STACK = re.compile(r' *File "(?P<file>[^"]*)", line (?P<line>\d+) in ')
# When and where a line was written.
STAMP = re.compile(r"\[[WE]\d+ [\d:.]+ \S+\] (\[c10d\] )?|\S+\.py:\d+: |^\[rank\d+\]: ?")
# Where gloo was built, which is long.
SOURCE = re.compile(r"\[(enforce fail at )?/\S*/gloo/(\S+\.cc:\d+)\]")


@contextmanager
def _watched(rank: int) -> Iterator[None]:
    """Run the script in the block, and write notes of what it did; each rank calls it."""
    from ddp_helpers.lessons.script_notes import noted

    with noted(Path(f"rank{rank}.notes").absolute()):
        yield


class LearnerRun(ForkedScript):
    """Ranks that run one of a learner's scripts, each in a process."""

    def __init__(
        self,
        script: Path,
        *arguments: object,
        ranks: int,
        limit: float = LIMIT,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        watched: bool = False,
    ) -> None:
        """Start the ranks, as ForkedScript does. watched: keep notes of what the script does."""
        super().__init__(
            script,
            *arguments,
            ranks=ranks,
            limit=limit,
            env=env,
            folder=folder,
            around=_watched if watched else None,
        )

    def complaint(self) -> str:
        """Say how the first failed rank ended, with its telling lines; "" if none failed."""
        rank = self.first_failed()
        if rank is None:
            return ""
        return "\n".join(
            [
                f"rank {rank} {exit_text(self.exit_statuses[rank])}:",
                *telling_lines(self.lines_of_rank(rank)),
            ]
        )

    def notes(self) -> list["RankNotes"]:
        """Return what each rank of a watched run has done."""
        from ddp_helpers.lessons.script_notes import read_notes

        ranks = range(len(self.exit_statuses))
        return [read_notes(self.folder / f"rank{rank}.notes") for rank in ranks]


def telling_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines of a rank that tell what it did, or what went wrong, without repeats.

    They are the last MOST_LINES of these, cut at LINE_WIDTH characters.
    """
    kept = []
    for line in lines:
        if frame := STACK.match(line):
            if "/build/cells/" in frame["file"]:
                kept.append(f"in line {frame['line']} of the cell")
        elif not NOISE.match(line):
            kept.append(SOURCE.sub(r"[\1gloo/\2]", STAMP.sub("", line)).strip())
    shown = list(dict.fromkeys(kept))[-MOST_LINES:]
    return [line if len(line) <= LINE_WIDTH else f"{line[:LINE_WIDTH]} …" for line in shown]


def weight_distance(weights: Mapping, others: Mapping) -> float:
    """Return the largest difference of two networks' weights, infinite if their names differ."""
    if weights.keys() != others.keys():
        return float("inf")
    differences = [float((weights[name] - others[name]).abs().max()) for name in weights]
    return max(differences, default=float("inf"))
