"""Find what a log says in Python's and C++'s own form: tracebacks, and lines of errors.

`judge` calls it. An exception that no rule knows is still an answer: its last lines.
"""

import builtins
import re
from collections.abc import Iterator, Sequence

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
_COMPLAINT = re.compile(
    r"(?:^|[\s|])(?:[Ff]atal )?(?:[Ee]rror|ERROR|FATAL|fatal): (?!\s*[\d.]+\s*$)\S"
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


def own_frame(lines: Sequence[Line], final: Line) -> tuple[str, str]:
    """Return the place of the reader's own frame above an exception's line, "" if there is none.

    Also return the package of the innermost frame, which raised it; "" if that is the reader's own.
    """
    package = ""
    for file, number in _frames(lines, final):
        if not _OF_A_LIBRARY.search(file):
            return f"{file}:{number}", package
        named = _PACKAGE.match(file)
        package = package or (named[1] if named else file)
    return "", package


def innermost_frame(lines: Sequence[Line], final: Line) -> str:
    """Return the place of the frame that raised an exception, "" if none is shown."""
    return next((f"{file}:{number}" for file, number in _frames(lines, final)), "")


def _frames(lines: Sequence[Line], final: Line) -> Iterator[tuple[str, str]]:
    """Yield file and line of the frames above an exception's line, from the innermost on."""
    own, end = own_lines(lines, final)
    for place in range(end - 1, max(0, end - _LONGEST) - 1, -1):
        if _BEGIN in own[place].text and not _is_chained(own, place):
            return
        if match := _OF_A_FRAME.search(own[place].text):
            yield match[1], match[2]


def _is_chained(own: Sequence[Line], begin: int) -> bool:
    """Say whether the traceback that begins here is a part of one that began before it."""
    if "Original Traceback" in own[begin].text:  # of a loader's worker
        return True
    return any(_CHAINS.search(line.text) for line in own[max(0, begin - 3) : begin])


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
    errors = [line for line in lines if _is_error(line.text)]
    return errors or [line for line in lines if _FRAME.search(line.text)][-1:]


def complaints(lines: Sequence[Line]) -> list[Line]:
    """List the lines that name an error in any program's words, those of launchers left out."""
    return [
        line
        for line in lines
        if _COMPLAINT.search(line.text)
        and not _NO_ERROR.search(line.text)
        and not line.text.startswith(("srun: error", "slurmstepd: ", "ERROR:torch.distributed"))
    ]


def _is_error(text: str) -> bool:
    """Say whether a line is an error by its form."""
    if _BEGIN in text:
        return True
    return _ERROR.search(text) is not None and not _NO_ERROR.search(text)
