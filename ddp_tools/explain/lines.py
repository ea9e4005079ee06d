"""Read logs into lines: files, run folders or standard input, whatever wrote them.

`command` calls it, in one process. It raises PlainError, of one line, at what cannot be read.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_tools import PlainError
from ddp_tools.explain.prefixes import (
    is_labelled,
    shows_agents,
    split_at_marks,
    split_label,
    split_prefix,
    time_of,
    without_colours,
)

STDIN = "-"
TASK = " (of "  # and a label: behind a file's name where a node, or a task of srun, is no rank
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
    time: float | None  # that the line itself tells
    text: str


@dataclass
class Logs:
    """What was read: the lines, the files, and what is to be known of the reading.

    whole: nothing was left out. count: of the files' lines, those without text as well.
    """

    lines: list[Line]
    files: list[str]
    notices: list[str]
    whole: bool = True
    count: int = 0

    def left_out(self, notice: str) -> None:
        """Note what was not read."""
        self.notices.append(notice)
        self.whole = False


def own_lines(lines: Sequence[Line], order: int, step: int = 1) -> Iterator[Line]:
    """Yield a line and what its rank wrote behind it into its file; before it, if step is -1."""
    own = lines[order].file, lines[order].rank
    for place in range(order, len(lines) if step > 0 else -1, step):
        if (lines[place].file, lines[place].rank) == own:
            yield lines[place]


def is_next(line: Line, after: Line) -> bool:
    """Say whether a line stands directly behind another one in its file."""
    return (line.file, line.number + 1) == (after.file, after.number)


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
    agents = labelled and shows_agents(lines)
    in_name = _OF_TORCHRUN.search(name) or _RANK_IN_NAME.search(Path(name).name)
    file_rank = int(in_name[1]) if in_name else None
    logs.files.append(name)
    logs.count += len(lines) - (not lines[-1])
    notices: list[str] = []
    for number, line in enumerate(lines, start=1):
        label, text = split_label(line) if labelled else ("", line)
        task = int(label) if label.isdigit() else None
        time = time_of(text)
        for rank, rest in map(split_prefix, _pieces(text)):
            if task is not None and rank not in (None, task):
                told = (
                    f"srun's task {task} holds torch's rank {rank}: each task starts a torchrun, "
                    "which is right with one task a node alone (--ntasks-per-node=1)"
                )
                notices = notices or [told]
            file = name
            if label and rank is None and (agents or task is None):
                file = f"{name}{TASK}{label})"  # of a torchrun or a node, of no rank
            elif rank is None:
                rank = task
            rank = file_rank if rank is None else rank
            if rest.strip():
                logs.lines.append(Line(file, number, rank, time, rest))
    logs.notices += notices


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


def _pieces(text: str) -> Iterator[str]:
    """Yield the pieces of a line: a bar is drawn over itself, and ranks write one behind another.

    A piece is what stands between two carriage returns, or from one rank's mark to the next one's.
    """
    for drawn in text.split("\r"):
        yield from filter(str.strip, split_at_marks(drawn))
