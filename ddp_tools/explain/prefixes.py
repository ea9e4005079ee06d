"""Take off what launchers and loggers put in front of a line, and read rank and time from it.

`lines` calls it for each line of a log.
"""

import re
from collections.abc import Iterable, Sequence

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_PREFIXES = (
    re.compile(r" {0,2}\[[Rr]ank[ :=]?(\d{1,6})\](?:: ?| |(?=\[))"),  # torch: [rank0]: and ours
    re.compile(r"\[[A-Za-z_]+(\d{1,6})\]: ?"),  # torchrun --tee: [default0]:
    re.compile(r"\[(?:[\w.-]+@)?\d+,(\d{1,6})\]<std(?:err|out|diag)>: ?"),  # Open MPI 4 and 5
)
# What stands before a rank's own mark, or before the text: a quote, a test's or Ray's process.
_NOISE = re.compile(r"(?:>+ |(?:stderr|stdout): |\(\w[\w.:<>-]* pid=\d+[^)]*\) )+")
_MARK = re.compile(r"(?=\[rank\d{1,6}\]:)")
# srun --label, or a launcher that puts the node's name in front (a name with a digit in it).
_LABEL = re.compile(r" *(\d{1,6}|[a-z][\w.-]*\d[\w.-]*): ?")
# A log with one of these shows a torchrun: then a task of srun is an agent, and no rank.
_OF_AN_AGENT = re.compile(r"torch/distributed/(?:run|launcher|elastic)\b|\bsrun\b.*\btorchrun\b")
_OF_OUR_JOB = re.compile(r"job \d+ on \S+: \d+ ranks?, meeting at ")  # whose ranks have labels
_OF_A_LAUNCHER = re.compile(r"(?:srun|slurmstepd|sbatch|mpirun|prterun)\b|\*\*\*|-{5}")
# A rank behind a time and a level alone, as loggers write it; it stays in the text.
_LOGGED = re.compile(
    r"[\d\-/:.,TZ+ |\[\]()]*(?:\b(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)\b[\s|:\-\]]*)?"
    r"[\[(]?\b[Rr]ank[ :=]?(\d{1,6}) ?[\]):|]"
)
_IN_TEXT = re.compile(r"\[(?:PG [^\]]*?)?Rank (\d{1,6})\]")
_GLOG = re.compile(r"\b[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d+)?)")
_ISO = re.compile(r"\b\d{4}[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)")
_AMERICAN = re.compile(r"\b(\d\d)/(\d\d)/\d{4}[T ](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)")
# Share of lines with a label from the first to the last one that has it, and of all lines.
_LABELLED, _OF_ALL = 0.8, 0.5


def without_colours(text: str) -> str:
    """Take terminal colours and titles out of a text."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def is_labelled(lines: Sequence[str]) -> bool:
    """Say whether nearly each line begins with a task's number, as after `srun --label`, or a node.

    What a batch script prints before and behind its srun has none, nor have launchers' own lines;
    in a log of a job of the course some lines have a label.
    """
    if any(map(_OF_OUR_JOB.match, lines)):
        return True
    own = [line for line in lines if line.strip() and not _OF_A_LAUNCHER.match(line)]
    labelled = [place for place, line in enumerate(own) if _LABEL.match(line)]
    if len(own) < 2 or len(labelled) < _OF_ALL * len(own):
        return False
    return len(labelled) >= _LABELLED * (labelled[-1] - labelled[0] + 1)


def shows_agents(lines: Iterable[str]) -> bool:
    """Say whether a log shows a torchrun: then a task of a launcher around it is no rank."""
    return any("torch" in line and _OF_AN_AGENT.search(line) for line in lines)


def split_label(line: str) -> tuple[str, str]:
    """Return the label of a line of a labelled log, "" if it has none, and what stands behind."""
    match = _LABEL.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


def split_prefix(text: str) -> tuple[int | None, str]:
    """Return the rank that the prefixes of a line name, if any, and what stands behind them."""
    rank = None
    if noise := _NOISE.match(text):
        text = text[noise.end() :]
    while match := next(filter(None, (prefix.match(text) for prefix in _PREFIXES)), None):
        rank, text = int(match[1]), text[match.end() :]
    if rank is None and "ank" in text:
        match = _LOGGED.match(text) or _IN_TEXT.search(text[:400])
        rank = int(match[1]) if match else None
    return rank, text


def split_at_marks(text: str) -> list[str]:
    """Split a line before each `[rank0]:` that stands behind other text: a bar, or another rank."""
    if "[rank" not in text:
        return [text]
    pieces: list[str] = []
    for piece in _MARK.split(text):
        if pieces and not split_prefix(pieces[-1])[1].strip():
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


def time_of(text: str) -> float | None:
    """Return the time that a line begins with, in seconds of a year of 31-day months, or None.

    Many logs leave out the year, so it never counts.
    """
    head = text[:200]
    if ":" not in head:
        return None
    match = _GLOG.search(head) or _ISO.search(head) or _AMERICAN.search(head)
    if not match:
        return None
    month, day, hour, minute = (int(number) for number in match.groups()[:4])
    days = 31 * month + day
    return ((24 * days + hour) * 60 + minute) * 60 + float(match[5].replace(",", "."))
