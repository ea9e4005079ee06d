"""Find what a log says in Python's and C++'s own form: tracebacks, and lines of errors.

`judge` calls it. An exception that no rule knows is still an answer: its last lines.
"""

import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ddp_tools.explain.lines import Line, own_lines

_BEGIN = "Traceback (most recent call last)"
_CHAINS = re.compile(
    r"During handling of the above exception|exception was the direct cause of the following"
)
_FINAL = re.compile(r"^[A-Za-z_][\w.]*(?:: |:$|$)")
_LONGEST = 400  # lines of a traceback
_BUILT_IN = "|".join(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
)
_RATE = r" *(?:\d*\.\d+|\d+ ?(?:%|$))"  # "error: 0.023" is a measure of a model
# A line that is an error by its form, not by a word in somebody's sentence.
_ERROR = re.compile(
    r"^\W{0,3}(?:[\w./-]+: )?(?:fatal |internal |unknown )?"
    rf"(?:error|Error|ERROR|FATAL|Fatal|CRITICAL)\b ?[:\]](?!{_RATE})"
    r"|^\[?[EF]\d{4} \d\d:\d\d|^[\w./-]+: line \d+: "
    r"|^Error (?:executing|in|while|loading) |NCCL WARN .*(?:[Ff]ailed|[Ee]rror)"
    r"|^(?:srun|sbatch|slurmstepd|slurmd|mpirun): error: |^status\.json: failed"
    r"|^(?:[\w./+-]+: )?fatal: "
    r"|(?:^|[\s|])(?:[Ff]atal )?(?:[Ee]rror|ERROR|FATAL|fatal): (?!\s*-?[\d.]+(?:\s|$))\S"
    rf"|: No such file or directory\s*$|^{re.escape(_BEGIN)}"
    rf"|^(?:{_BUILT_IN}|\w+\.[\w.]*(?:Error|Exception))(?:: |\s*$)"
    r"|\(core dumped\)|^terminate called|^\s*what\(\):|^Fatal Python error|^make: \*\*\*"
)
# A piece of a traceback whose end nobody pasted: Python's, IPython's, rich's or C++'s.
_FRAME = re.compile(
    r'^\W*File ".+", line \d+, in |^\s+raise \w|^-+> \d+ |❱ +\d+ |^frame #\d+: '
    r"|^Exception raised from "
)
# An exception's own line, whose traceback nobody pasted; and glog's last words, before it aborts.
_EXCEPTION = re.compile(
    rf"^(?:{_BUILT_IN}|\w+\.[\w.]*(?:Error|Exception)): \S|^F\d{{4}} \d\d:\d\d:"
)
_NO_ERROR = re.compile(
    r"\b(?:INFO|DEBUG|WARNING)\b|(?<!NCCL )\bWARN\b|: ignored\.?\s*$"
    r"|fatal: not a git repository"
    r"|Unable to register cu\w+ factory|pip's dependency resolver does not currently"
)


def final_lines(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the last line of each traceback, which names the exception, and such lines alone.

    The lines of a rank may stand between those of others: each rank is read by itself.
    """
    yield from (line for line in lines if _may_be_one(line.text) and _EXCEPTION.search(line.text))
    by_rank: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        by_rank.setdefault((line.file, line.rank), []).append(line)
    for own in by_rank.values():
        for index, line in enumerate(own):
            column = line.text.find(_BEGIN)
            if column >= 0:
                final = _final(own, index + 1, line.text[:column])
                if final:
                    yield final


def _may_be_one(text: str) -> bool:
    """Say whether a line may be an exception's: most lines of a long log cannot."""
    return "Error" in text or "Exception" in text or text.startswith(("F", "Stop"))


_OF_A_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OF_A_LIBRARY = re.compile(
    r"(?:site|dist)-packages[/\\]|/lib(?:64)?/python\d|\\Lib\\|/bin/\w+$|^<"
    r"|^\.\./(?:torch|aten)/|[/\\]torch[/\\](?:_\w+|distributed|nn|utils|autograd|optim|cuda)[/\\]"
)
_PACKAGE = re.compile(
    r".*(?:(?:site|dist)-packages|/lib(?:64)?/python[\d.]+|\\Lib)[/\\](\w+)"  # the last counts
)
# Where a message has one of these, the ranks may be its cause, whoever raised it.
_OF_RANKS = re.compile(
    r"(?i)\b(?:ranks?|[nrxhm]ccl\w*|gloo|world.?size|collectives?|mesh|process.?groups?"
    r"|(?:tcp|file|hash|prefix)?store|rendezvous|all_?(?:reduce|gather)\w*|barrier|peers?)\b"
)


@dataclass(frozen=True, slots=True)
class Raised:
    """Where an exception was raised, as its traceback shows it; "" for what it does not show.

    inner: the innermost frame. own: the reader's own frame nearest to it. package: of the innermost
    frame; "" if that is the reader's own.
    """

    inner: str = ""
    own: str = ""
    package: str = ""


def raised_at(lines: Sequence[Line], order: int) -> Raised:
    """Return where the exception was raised whose last line stands at this place."""
    inner = package = ""
    for file, number in _frames(lines, order):
        inner = inner or f"{file}:{number}"
        if not _OF_A_LIBRARY.search(file):
            return Raised(inner, f"{file}:{number}", package)
        named = _PACKAGE.match(file)
        package = package or (named[1] if named else file)
    return Raised(inner, "", package)


def _frames(lines: Sequence[Line], order: int) -> Iterator[tuple[str, str]]:
    """Yield file and line of the frames above an exception's line, from the innermost on."""
    above = list(islice(own_lines(lines, order, -1), 1, _LONGEST))
    for place, line in enumerate(above):
        if _BEGIN in line.text and not _is_chained(line, above[place + 1 : place + 4]):
            return
        if match := _OF_A_FRAME.search(line.text):
            yield match[1], match[2]


def _is_chained(begin: Line, above: Sequence[Line]) -> bool:
    """Say whether the traceback that begins here is a part of one that began before it."""
    if "Original Traceback" in begin.text:  # of a loader's worker
        return True
    return any(_CHAINS.search(line.text) for line in above)


def without_frames(lines: Iterable[Line]) -> Iterator[Line]:
    """Leave out the frames of tracebacks, with their source lines: these are no messages."""
    inside: set[tuple[str, int | None]] = set()
    for line in lines:
        own = line.file, line.rank
        if 'File "' in line.text and _OF_A_FRAME.search(line.text):
            inside.add(own)
        elif own not in inside or not line.text[:1].isspace():
            inside.discard(own)
            yield line


def is_of_ranks(text: str) -> bool:
    """Say whether a message speaks of ranks or of what they do together."""
    return _OF_RANKS.search(text) is not None


def _final(own: Sequence[Line], begin: int, prefix: str) -> Line | None:
    """Return the line that ends a traceback which begins before this index."""
    for line in own[begin : begin + _LONGEST]:
        text = line.text
        text = text[len(prefix) :] if text.startswith(prefix) else text
        if text[:1].strip() and _FINAL.match(text):
            return line
    return None


def error_lines(lines: Sequence[Line]) -> list[Line]:
    """List the lines that are errors by their form; where there are none, a traceback's last."""
    errors = [
        line for line in lines if _ERROR.search(line.text) and not _NO_ERROR.search(line.text)
    ]
    return errors or [line for line in lines if _FRAME.search(line.text)][-1:]
