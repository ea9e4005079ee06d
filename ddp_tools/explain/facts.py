"""Collect what a log shows, on one page and without advice: for an issue, or for an assistant.

`command` calls it, with the verdict on each attempt. What the log does not show is left out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ddp_tools.explain.attempts import world_sizes
from ddp_tools.explain.judge import Verdict
from ddp_tools.explain.lines import Line, Logs
from ddp_tools.explain.report import cut
from ddp_tools.explain.rules import LEVELS
from ddp_tools.explain.watchdog import name_ranks

_LONGEST, _MOST = 300, 12  # letters of a line; lines of a kind
_LEADS = 8  # lines before the root
_CALL = re.compile(r"\bSeqNum=(\d+), OpType=(\w+)")
_VERSIONS = {
    "torch": r"\b(?:PyTorch|pytorch|torch)(?:-gpu)?(?: version)?[ :=/-]+"
    r"v?(\d+\.\d+[\w.+-]*)(?![\w.+-]| and | or )",
    "NCCL": r"\b(?:NCCL|RCCL)(?: version)?[ :=]+v?(\d+\.\d+[\w.+:-]*)|nvidia-nccl-cu\d+ +(\S+)",
    "CUDA": r"\bCUDA(?: version)?[ :=]+v?(\d+\.\d+[\w.]*)|\+cuda(\d+\.\d+)|\+cu(\d{3})\b",
    "ROCm": r"\bROCm version *: *(\S+)",
    "Python": r"\b[Pp]ython ?(3\.\d+(?:\.\d+)?)\b",
    "Slurm": r"\bslurm(?:-wlm)? (\d\d\.\d\d\.\S+)",
    "driver": r"[Dd]river [Vv]ersion[ :=]+(\d+\.\d+[\d.]*)",
}
_NAMES = "CUDA|NCCL|RCCL|TORCH|PYTORCH|GLOO|HSA|HIP|ROCR|OMP|MKL|MASTER|WORLD|RANK|LOCAL|SLURM"
_VARIABLE = re.compile(
    rf"\b((?:{_NAMES}|LD|FI|UCX|OMPI|PMI|ACCELERATE|DS|XLA|KMP)_\w*|RANK)(?:=|: )([^\s;,]+)"
)
# A line that holds settings alone, as `env` prints them; advice has other words around it.
_DUMP = re.compile(r"\W*(?:(?:export|declare -x|set) )?(?:[A-Z_]\w*(?:=|: )\S*\s*)+$")
_SET = re.compile(r"NCCL INFO (\w+) set by environment to (\S+?)\.?$")
_LAUNCHERS = {
    "torchrun": r"torchrun|torch[/.]distributed[/.](?:elastic|run|launch)",
    "srun": r"\bsrun\b|slurmstepd",
    "mpirun": r"\b(?:mpirun|mpiexec|prterun|hydra)\b",
    "deepspeed": r"\bdeepspeed (?:--|\S+\.py)|deepspeed[/.]launcher",
    "accelerate": r"\baccelerate launch|accelerate/commands/launch",
}
_STARTERS = r"(?:srun|torchrun|mpirun|mpiexec|deepspeed|accelerate launch|\S*python[\d.]*) \S.*"
_COMMAND = re.compile(  # alone, as a shell shows it by `set -x`, or behind its prompt
    rf"(?:^|cmd[ :=]+)\s*((?:\S+=\S+ )*{_STARTERS})|^(?:\++|[$>]) ((?:.* )?{_STARTERS})"
)
_WARNS = re.compile(r"Warning: |^\[?W\d{3,4} \d\d:|\bWARN(?:ING)?\b(?! *\()")


def facts(verdicts: Sequence[Verdict], logs: Logs) -> dict[str, object]:
    """Return the facts of a log as values of JSON, those that it shows."""
    texts = [line.text for line in logs.lines]
    whole = "\n".join(texts)
    commands = [match[1] or match[2] for text in texts if (match := _COMMAND.search(text))]
    found: dict[str, object] = {
        "read": f"{', '.join(logs.files)}: {logs.count:,} lines",
        "notices": logs.notices,
        "versions": _versions(whole),
        "launchers": [name for name, form in _LAUNCHERS.items() if re.search(form, whole)],
        "command lines": _once(commands),
        "variables": _once(_variables(texts, commands)),
        "attempts": [_of_attempt(verdict) for verdict in verdicts],
    }
    return {name: value for name, value in found.items() if value}


def _of_attempt(verdict: Verdict) -> dict[str, object]:
    """Return what is known of one attempt."""
    seen, root, raised = verdict.seen, verdict.root, verdict.raised
    lines = seen.lines
    ranks = {*seen.ranks, *(end.rank for end in seen.endings if end.rank is not None)}
    found: dict[str, object] = {
        "lines": f"{lines[0].number} to {lines[-1].number}" if lines else "none",
        "world size": world_sizes(lines),
        "ranks": name_ranks(ranks) if ranks else "",
        "ended well": verdict.well,
    }
    if root:
        first = f"rank {verdict.first} ({verdict.by})"
        unknown = f"not known: {verdict.by}" if verdict.by else ""
        found |= {
            "failed first": unknown if verdict.first is None else first,
            "not there when it was needed": name_ranks(verdict.late) if verdict.late else "",
            "root": _place(replace(root.lines[0], rank=root.rank)),
            "innermost frame": raised.inner,
            "own frame": raised.own,
            "the message says": list(verdict.said),
        }
        leads = {root.rank}
        if verdict.late and root.level == LEVELS["waits"]:  # who waits only tells of it
            call = _CALL.search(root.lines[0].text)
            what = f"{call[2]} number {call[1]}" if call else "what the others waited for"
            found["seen by"] = found["root"]
            found["root"] = f"{name_ranks(verdict.late)} did not come to {what}"
            leads = {*verdict.late}
        before = [line for line in lines[: root.order] if {line.rank, None} & leads]
        found["lines that lead to the root"] = [*map(_place, before[-_LEADS:])]
    found["warnings"] = _once(_place(line) for line in lines if _WARNS.search(line.text))
    found["exceptions"] = _once(map(_place, seen.finals))
    firsts: dict[int, Line] = {}
    for finding in sorted(seen.serious, key=lambda finding: finding.order):
        if finding.rank is not None:
            firsts.setdefault(finding.rank, finding.lines[0])
    found["first failure of each rank"] = _once(_place(firsts[rank]) for rank in firsts)
    found["NCCL warns"] = _once(_place(line) for line in lines if "NCCL WARN" in line.text)
    found["endings"] = _once(_place(ending.line) for ending in verdict.seen.endings)
    found["last line of each rank"] = _last_lines(lines)
    return {name: value for name, value in found.items() if value}


def _once(values: Iterable[str]) -> list[str]:
    """List values once each, up to a limit."""
    return list(dict.fromkeys(values))[:_MOST]


def _place(line: Line) -> str:
    rank = "" if line.rank is None else f"rank {line.rank}, "
    return f"{rank}line {line.number}: {cut(line.text.strip(), _LONGEST)}"


def _versions(whole: str) -> dict[str, list[str]]:
    found = {}
    for name, form in _VERSIONS.items():
        written = (next(filter(None, match.groups())) for match in re.finditer(form, whole))
        # cu128 is CUDA 12.8
        found[name] = _once(re.sub(r"^(\d\d)(\d)$", r"\1.\2", each) for each in written)
    return {name: versions for name, versions in found.items() if versions}


def _variables(texts: Iterable[str], commands: Sequence[str]) -> Iterator[str]:
    """Yield what is set: by a command, in a dump of the environment, or as NCCL says it."""
    for text in texts:
        if match := _SET.search(text):
            yield f"{match[1]}={match[2]}"
        if _DUMP.match(text):
            yield from _settings(text)
    yield from (each for command in commands for each in _settings(command))


def _settings(text: str) -> list[str]:
    return [cut(f"{name}={value}", _LONGEST) for name, value in _VARIABLE.findall(text)]


def _last_lines(lines: Sequence[Line]) -> dict[str, str]:
    last = {line.rank: line for line in lines if line.rank is not None}
    return {f"rank {rank}": _place(last[rank]).partition(", ")[2] for rank in sorted(last)}


def facts_as_text(found: dict[str, object]) -> str:
    """Write the facts down for a person."""
    return "\n".join(_written(found, ""))


def _written(value: object, indent: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            if isinstance(part, dict | list):
                yield f"{indent}{name}:"
                yield from _written(part, indent + "  ")
            else:
                yield f"{indent}{name}: {part}"
    elif isinstance(value, list):
        for number, part in enumerate(value, start=1):
            if isinstance(part, dict):
                yield f"{indent}{number}."
                yield from _written(part, indent + "  ")
            else:
                yield f"{indent}{part}"
