"""Read logs into lines: files, run folders or standard input, whatever wrote them.

`command` calls it, in one process. It raises PlainError, of one line, at what cannot be read.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_tools import PlainError
from ddp_tools.explain.prefixes import (
    is_label,
    is_labelled,
    split_at_marks,
    split_prefix,
    starts_agents,
    time_of,
    without_colours,
)

STDIN = "-"
TASK = " (task "  # and a number: behind a file's name where a task of srun is no rank
_PART = 16_000_000  # bytes of a file's beginning, and of its end, that are read of a longer one
_MOST_FILES = 4096
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_LOG = re.compile(r"(?i)\.(?:log|out|err|txt|o\d+|e\d+)$|^(?:log|std(?:out|err)|slurm-)|^nohup")
_RANK_IN_NAME = re.compile(r"(?i)rank[_.-]?(\d{1,6})(?!\d)")
_OF_TORCHRUN = re.compile(r"attempt_\d+/(\d{1,6})/std(?:err|out)")  # torchrun --log-dir


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log, without prefixes and colours."""

    file: str
    number: int
    rank: int | None
    time: float | None  # its own, or that of the line of its rank before it
    text: str


@dataclass
class Logs:
    """What was read: the lines, the files, and what is to be known of the reading.

    whole: nothing was left out.
    """

    lines: list[Line]
    files: list[str]
    notices: list[str]
    whole: bool = True

    def left_out(self, notice: str) -> None:
        """Note what was not read."""
        self.notices.append(notice)
        self.whole = False


def own_lines(lines: Sequence[Line], line: Line) -> tuple[list[Line], int]:
    """Return the lines of this line's file and rank, and its place among them."""
    own = [it for it in lines if (it.file, it.rank) == (line.file, line.rank)]
    return own, next(place for place, it in enumerate(own) if it is line)


def read_logs(paths: Sequence[Path]) -> Logs:
    """Read files and folders; `-` is standard input. Raises PlainError."""
    logs = Logs([], [], [])
    for path in paths:
        if str(path) == STDIN:
            _add(logs, "standard input", sys.stdin.buffer.read(2 * _PART))
            if sys.stdin.buffer.read(1):
                logs.left_out("standard input is long: its end was not read. Give it as a file")
        elif path.is_dir():
            _add_folder(logs, path)
        else:
            _add_file(logs, path)
    if not logs.lines:
        logs.notices.append("nothing stands in it: the job wrote nothing, or into another file")
    return logs


def _add_folder(logs: Logs, folder: Path) -> None:
    """Read the logs of a run folder, and the reason in its status.json."""
    files = (path for path in folder.rglob("*") if _LOG.search(path.name) and path.is_file())
    chosen = sorted(files)
    if left := chosen[_MOST_FILES:]:
        more = f"{len(left):,} of its {len(chosen):,} logs were not read, from {left[0]} on"
        logs.left_out(f"{folder}: {more}. Give them, or the folders below it, one by one")
    chosen = chosen[:_MOST_FILES]
    status = folder / "status.json"
    if not chosen and not status.exists():
        cure = "give the log itself, or a folder with files named *.log, *.out or *.err"
        raise PlainError(f"{folder} holds no log: {cure}")
    for path in chosen:
        try:
            _add_file(logs, path)
        except PlainError as error:
            logs.left_out(f"left out: {error}")
    if status.exists():
        _add_status(logs, status)


def _add_status(logs: Logs, path: Path) -> None:
    """Add why a run of the course's scripts says that it failed, as a line."""
    try:
        status = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        state, why = status.get("state"), status.get("why", "")
    except (ValueError, AttributeError, OSError):
        logs.left_out(f"left out: {path} is no record of a run")
        return
    logs.files.append(str(path))
    if state:
        text = " ".join(str(why).splitlines())
        logs.lines.append(Line(str(path), 1, None, None, f"status.json: {state}: {text}"))


def _add_file(logs: Logs, path: Path) -> None:
    """Read a file, of a long one the beginning and the end."""
    try:
        with path.open("rb") as file:
            content = file.read(2 * _PART)
            rest = path.stat().st_size - len(content)
            if rest > 0:
                file.seek(-_PART, 2)
                content = content[:_PART] + b"\n" + file.read()
                logs.left_out(f"{path} is long: {rest:,} bytes in its middle were not read")
    except OSError as error:
        raise PlainError(f"{path} cannot be read ({error.strerror}): give a log's path") from None
    _add(logs, str(path), content)


def _add(logs: Logs, name: str, content: bytes) -> None:
    """Add the lines of a log. Raises PlainError where it is no text."""
    lines = [without_colours(line) for line in _text(name, content).split("\n")]
    labelled = is_labelled(lines)
    agents = labelled and starts_agents(lines)
    in_name = _OF_TORCHRUN.search(name) or _RANK_IN_NAME.search(Path(name).name)
    file_rank = int(in_name[1]) if in_name else None
    logs.files.append(name)
    times: dict[int | None, float | None] = {}
    row: tuple[int, float | None] = (0, None)  # the time of the line that a piece is of
    told, label = False, (0, file_rank)
    for number, text in _numbered(lines):
        rank, rest = split_prefix(text, labelled)
        if labelled and not rest.strip():
            label = number, rank
        elif label[0] == number and rank is None:
            rank = label[1]  # a piece of a bar that is drawn over itself
        elif label[0] == number and rank != label[1] and not told:
            told = True
            logs.notices.append(
                f"srun's task {label[1]} holds torch's rank {rank}: each task starts a torchrun, "
                "which is right with one task a node alone (--ntasks-per-node=1)"
            )
        file = name
        if agents and rank is not None and is_label(text, rank):
            file, rank = f"{name}{TASK}{rank})", None  # a torchrun's own line: of no rank
        rank = file_rank if rank is None else rank
        time = time_of(text)
        if time is None and number == row[0]:
            time = row[1]
        row = number, time
        if time is None:
            time = times.get(rank)
        times[rank] = time
        if rest.strip():  # of `1: [rank1]: text`, as under srun --label, the first piece has none
            logs.lines.append(Line(file, number, rank, time, rest))


def _text(name: str, content: bytes) -> str:
    """Decode a log: UTF-8, or UTF-16 with its mark. Raises PlainError for anything else."""
    kind = next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), "")
    if kind:
        raise PlainError(f"{name} is compressed ({kind}): unpack it first")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return content.decode("utf-16", errors="replace")
    zeros = content[:8192].count(0)
    if zeros > 64 or zeros > len(content[:8192]) // 8:  # a hole, as NFS leaves it, has some
        raise PlainError(f"{name} is no text (it holds zero bytes): give a log")
    return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace").replace("\0", "")


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield each line with its number; of a bar drawn over itself, each piece is one of the line.

    A piece is what stands between two carriage returns, or from one rank's mark to the next one's.
    """
    for number, line in enumerate(lines, start=1):
        for drawn in line.split("\r"):
            for piece in filter(str.strip, split_at_marks(drawn)):
                yield number, piece
