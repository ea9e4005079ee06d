"""Read a job file (sbatch) that does not work: each known fault with its line and the fix.

The faults are data, in jobfile.toml; what has to be compared is in `jobfile_checks`. `command`
calls `explain_job`, in one process. Nothing of the file is run.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ddp_tools import PlainError, printable
from ddp_tools.explain.jobfile_checks import compare, unread
from ddp_tools.explain.jobfile_start import Start, table
from ddp_tools.explain.jobfile_text import JobFile

_SOUND, _FAULTY, _NOT_SEEN = 0, 1, 4
_NAMES = (".sbatch", ".slurm", ".sbat")
_DIRECTIVE = re.compile(r"(?im)^[ \t]*#[ \t]*SBATCH[ \t]+-")
_OTHERS = {"PBS": r"(?m)^#PBS\s+-", "LSF": r"(?m)^#BSUB\s+-", "Grid Engine": r"(?m)^#\$\s+-"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: how it is known, what Slurm does with it, the fix, and what a Slurm here printed.

    kind: `fault`; `note` for what only some clusters mind; `risk` for what happens now and then;
        `unseen` for what no file can tell.
    on: where `pattern` is looked for: in each `line`, each `command`, or each `start` of ranks,
        in which variables of the file are filled in. A `\\0` stands for a dollar that the batch
        shell leaves to the shells of the tasks. `code`: jobfile_checks knows it.
    when, unless: facts of the start, or of any start; all must hold, and none.
    without: a pattern that the whole file must not hold.
    script: a pattern of the Python script that makes it sound. If the script is not there, that
        is said: it is not seen.
    """

    id: str
    meaning: str
    cure: str
    kind: str = "fault"
    on: str = "code"
    pattern: str = ""
    when: Sequence[str] = ()
    unless: Sequence[str] = ()
    without: str = ""
    script: str = ""
    tried: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A fault in a file: its line, and the values of its sentences."""

    fault: Fault
    line: int
    values: dict[str, object] = field(default_factory=dict)
    seen: bool = True  # False: it depends on a script that is not there


@cache
def load_faults() -> dict[str, Fault]:
    """Read the faults of jobfile.toml; raises TypeError at a key that no fault has."""
    return {row["id"]: Fault(**row) for row in table()["fault"]}


def not_seen(job: JobFile) -> list[str]:
    """List what a job file needs and was not seen to have, and options that no check reads."""
    options = dict.fromkeys([*table()["read"], *table()["indifferent"]], "(?s).*")
    return [*job.unseen(), *unread(job, options | table()["values"])]


def is_job_file(path: Path) -> bool:
    """Say whether a file is one for sbatch: by its name, or by a shebang and directives.

    Raises PlainError at one for another scheduler.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(16_000).decode("utf-8", errors="replace")
    begins = head.startswith("#!") or path.suffix in (*_NAMES, ".sh")
    if path.suffix in _NAMES or (begins and _DIRECTIVE.search(head)):
        return True
    for name, directive in _OTHERS.items():
        if head.startswith("#") and re.search(directive, head):
            raise PlainError(f"{path} is a job file for {name}: explain reads those of Slurm alone")
    return False


def judge_job(job: JobFile) -> list[Found]:
    """Return what is wrong with a job file, in the order of its lines."""
    faults = load_faults()
    found = [
        Found(faults[id_], line, values, seen=faults[id_].kind != "unseen")
        for id_, line, values in compare(job)
    ]
    for fault in faults.values():
        if fault.on != "code" and not (fault.without and re.search(fault.without, job.bare)):
            found += _of_row(job, fault)
    return sorted(found, key=lambda one: (not one.seen, one.fault.kind, one.line))


def _of_row(job: JobFile, fault: Fault) -> Iterator[Found]:
    """Yield the first place of a fault that is known by a pattern and facts."""
    pattern = re.compile(fault.pattern)
    for line, text, facts, start in _places(job, fault.on):
        if set(fault.when) <= facts and not set(fault.unless) & facts and pattern.search(text):
            script = job.script(start) if fault.script and start else ""
            if script is None or not (fault.script and re.search(fault.script, script)):
                yield Found(fault, line, seen=script is not None)
                return


def _places(job: JobFile, on: str) -> Iterator[tuple[int, str, set[str], Start | None]]:
    """Yield where a pattern is looked for: line number, text, facts and the start."""
    for start in job.starts if on == "start" else ():
        yield start.line, start.text, start.facts, start
    for number, text in enumerate(job.bare.split("\n") if on == "line" else (), start=1):
        yield number, text, job.facts, None
    for command in job.commands if on == "command" else ():
        yield command.line, command.text, job.facts, None


# ---- the report


def explain_job(path: Path, as_json: bool = False) -> int:
    """Print what is wrong with a job file, and return the exit status.

    Raises PlainError at a file that cannot be read.
    """
    try:
        job = JobFile(path, path.read_bytes().decode("utf-8", errors="replace"))
    except OSError as error:
        raise PlainError(f"{path} cannot be read: {error.strerror}") from error
    found = judge_job(job)
    unseen = not_seen(job)
    status = _SOUND
    if unseen or not all(one.seen and one.fault.kind != "risk" for one in found):
        status = _NOT_SEEN
    if any(one.seen and one.fault.kind == "fault" for one in found):
        status = _FAULTY
    if as_json:
        print(json.dumps(_data(job, found, unseen, status), indent=1, ensure_ascii=False))
    else:
        print("\n".join(_text(job, found, unseen, status)))
    return status


def _text(job: JobFile, found: list[Found], unseen: list[str], status: int) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"Read {job.path}: {job.summary()}."
    for one in found:
        yield ""
        if not one.seen:
            what = "the folder is not beside the file. If it is not where sbatch is called:"
            if one.fault.kind != "unseen":
                what = "the script is not where the job file names it. If it does not say so:"
            yield f"Not seen: {what}"
        elif one.fault.kind == "note":
            yield "Depends on the cluster:"
        elif one.fault.kind == "risk":
            yield "May happen, and need not:"
        yield f"{job.path}:{one.line}: {_shown(job, one.line)}"
        for label, name in (("meaning:", "meaning"), ("fix:", "cure"), ("tried:", "tried")):
            if text := _filled(one, name):
                yield from _WRAPPER.wrap(f"{label:9}{text}")
    if unseen:
        yield ""
        yield from (f"Not seen: {sentence}" for sentence in unseen)
    if status == _SOUND:
        yield "No known fault is in it."


_WRAPPER = textwrap.TextWrapper(100, "  ", " " * 11)
_WRAPPER.break_long_words = _WRAPPER.break_on_hyphens = False


def _shown(job: JobFile, line: int) -> str:
    return printable(job.lines[line - 1].strip() if job.lines else "")[:120]


def _filled(one: Found, name: str) -> str:
    """Return a sentence of a fault with this file's values in it."""
    text: str = getattr(one.fault, name)
    for key, value in one.values.items():
        text = text.replace(f"{{{key}}}", str(value))
    return text


def _data(job: JobFile, found: list[Found], unseen: list[str], status: int) -> dict[str, object]:
    """Return the verdict as values of JSON."""
    faults = [
        {
            "id": one.fault.id,
            "kind": one.fault.kind if one.seen else "not seen",
            "line": one.line,
            "text": _shown(job, one.line),
            "meaning": _filled(one, "meaning"),
            "cure": _filled(one, "cure"),
            "tried": one.fault.tried,
        }
        for one in found
    ]
    verdict = {_SOUND: "no known fault", _FAULTY: "faults", _NOT_SEEN: "not seen"}[status]
    return {
        "verdict": verdict,
        "file": str(job.path),
        "summary": job.summary(),
        "faults": faults,
        "not_seen": unseen,
    }
