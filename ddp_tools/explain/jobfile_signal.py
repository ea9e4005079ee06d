"""Who gets the signal that a job file asks for before its end, and what becomes of it there."""

import re
import signal
from collections.abc import Iterator

from ddp_tools.explain.jobfile_shell import spaced
from ddp_tools.explain.jobfile_start import Start
from ddp_tools.explain.jobfile_text import JobFile

_SENDS = re.compile(r"\b(p?kill|scancel)\b(?:\s+(?:-s\s*|--signal[= ]|-)(\w+))?")
_KEPT = ("TERM", "HUP", "QUIT", "INT")  # by srun
_HANDLED = "TERM INT HUP QUIT"  # by torchrun, if nothing is said


def signals(job: JobFile) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the first fault of the signal, by its id, with the values of its sentences."""
    match = re.fullmatch(r"(?:([RB]+):)?(\w+)(?:@\d+)?", job.options.get("signal", ""))
    if not match:
        return
    for start in job.starts:
        values: dict[str, object] = {"start": start.line, "wrapper": start.wrapper or "mpirun"}
        for name, id_ in _ways(job, start, "B" in (match[1] or ""), _name(match[2])):
            if id_:
                yield id_, values | {"signal": name}
                return


def _name(sign: str) -> str:
    """Return a signal's name, of its name or number."""
    names = {f"{one.value}": one.name[3:] for one in signal.Signals}
    return names.get(sign, sign.upper().removeprefix("SIG"))


def _ways(job: JobFile, start: Start, batch: bool, name: str) -> Iterator[tuple[str, str]]:
    """Yield each signal that is sent on, and its fault or "".

    Args:
        batch: the batch script gets it, and not what srun starts.
        name: that of the signal which Slurm sends.
    """
    traps = (re.match(r"\s*(?:\w+\s+)?trap\s+(?:--\s+)?(\S+)(.*)", it.raw) for it in job.commands)
    bodies = [trap[1] for trap in traps if trap and name in map(_name, trap[2].split())]
    if not batch:
        launched = start.facts & {"srun", "other"}
        yield name, _received(job, start, name) if launched else "signal-no-step"
    elif re.match(r"\s*exec\s", start.text):
        yield name, _sent_by_kill(job, start, name)
    elif not bodies:
        yield name, "signal-no-trap"
    elif "background" not in start.facts:
        yield name, "signal-late"
    for body in bodies if batch else ():
        function = re.search(
            rf"(?s)\b{re.escape(body)}\s*(?:\(\)\s*)?\{{(.*?)[;\n]\s*\}}", job.bare
        )
        for by, sign in _SENDS.findall(function[1] if function else spaced(body)):
            sent = _name(sign or "TERM")
            if sent != "0":  # which asks if a process is there
                way = _received if by == "scancel" else _sent_by_kill
                yield sent, way(job, start, sent)


def _sent_by_kill(job: JobFile, start: Start, name: str) -> str:
    """Return the fault of a signal to the process that the batch script has started; or ""."""
    if "srun" in start.facts and name in _KEPT:
        return "signal-kept"
    return _received(job, start, name)


def _received(job: JobFile, start: Start, name: str) -> str:
    """Return the fault of a signal to a task, or ""."""
    if start.wrapper or "other" in start.facts:
        return "signal-wrapped"
    if "torchrun" not in start.facts:
        return ""
    text = f"{start.text}\n{job.bare}"
    told = re.search(r"(?i)signals[-_]to[-_]handle[= ]+[\"']?([\w,]+)", text)
    if name not in map(_name, (told[1] if told else _HANDLED).replace(",", " ").split()):
        return "signal-torchrun"
    return "" if re.search(r"(?i)shutdown[-_]timeout", text) else "signal-30s"
