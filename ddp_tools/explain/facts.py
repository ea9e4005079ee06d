"""Collect what a log shows, on one page and without advice: for an issue, or for an assistant.

`command` calls it, with the verdict on each attempt. What the log does not show is left out.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from ddp_tools.explain.exceptions import final_lines, innermost_frame
from ddp_tools.explain.judge import Verdict
from ddp_tools.explain.lines import Line, Logs
from ddp_tools.explain.report import cut
from ddp_tools.explain.watchdog import name_ranks

_LONGEST, _MOST = 300, 12  # letters of a line; lines of a kind
_LEADS = 8  # lines before the root
_SHORT, _FEW = 24, 4  # letters and numbers of values that stand in one line
_VERSIONS = {
    "torch": r"\b(?:PyTorch|pytorch|torch)(?: version)?[ :=]+"
    r"v?(\d+\.\d+[\w.+-]*)(?![\w.+-]| and | or )",
    "NCCL": r"\b(?:NCCL|RCCL)(?: version)?[ :=]+v?(\d+\.\d+[\w.+:-]*)|nvidia-nccl-cu\d+\s+(\S+)",
    "CUDA": r"\bCUDA(?: version)?[ :=]+v?(\d+\.\d+[\w.]*)|\+cuda(\d+\.\d+)|\+cu(\d{3})\b",
    "ROCm": r"\bROCm version *: *(\S+)",
    "Python": r"\b[Pp]ython ?(3\.\d+(?:\.\d+)?)\b",
    "Slurm": r"\bslurm(?:-wlm)? (\d\d\.\d\d\.\S+)",
    "driver": r"[Dd]river [Vv]ersion[ :=]+(\d+\.\d+[\d.]*)",
}
_NAMES = "CUDA|NCCL|RCCL|TORCH|PYTORCH|GLOO|HSA|HIP|ROCR|OMP|MKL|MASTER|WORLD|RANK|LOCAL|SLURM"
_VARIABLE = re.compile(
    rf"\b((?:{_NAMES}|LD|FI|UCX|OMPI|PMI|ACCELERATE|DS|XLA|KMP)_\w*|RANK)[=:] ?([^\s;]+)"
)
_SET = re.compile(r"NCCL INFO (\w+) set by environment to (\S+?)\.?$")
_LAUNCHERS = {
    "torchrun": r"torchrun|torch[/.]distributed[/.](?:elastic|run|launch)",
    "srun": r"\bsrun\b|slurmstepd",
    "mpirun": r"\b(?:mpirun|mpiexec|prterun|hydra)\b",
    "deepspeed": r"\bdeepspeed (?:--|\S+\.py)|deepspeed[/.]launcher",
    "accelerate": r"\baccelerate launch|accelerate/commands/launch",
}
_COMMAND = re.compile(
    r"(?:^|[+$>] |cmd[ :=]+)\s*((?:\S+=\S+ )*(?:srun|torchrun|mpirun|mpiexec|deepspeed"
    r"|accelerate launch|\S*python[\d.]*) \S.*)"
)
_WARNS = re.compile(r"\w*Warning: |^\[?W\d{3,4} \d\d:|\bWARN(?:ING)?\b(?! *\()")
_WORLD = re.compile(r"(?i)\bworld[_ ]?size\W{1,3}(\d+)\b|\bnranks (\d+)\b|(\d+) ranks, meeting at")


def facts(verdicts: Sequence[Verdict], logs: Logs) -> dict[str, object]:
    """Return the facts of a log as values of JSON, those that it shows."""
    texts = [line.text for line in logs.lines]
    launchers = [
        name for name, form in _LAUNCHERS.items() if any(re.search(form, t) for t in texts)
    ]
    sizes = (match for text in texts if (match := _WORLD.search(text)))
    found: dict[str, object] = {
        "read": f"{', '.join(logs.files)}: {len(logs.lines):,} lines",
        "notices": logs.notices,
        "versions": _versions(texts),
        "launchers": launchers,
        "world size": _once(next(filter(None, match.groups())) for match in sizes),
        "command lines": _once(match[1] for text in texts if (match := _COMMAND.search(text))),
        "variables": _once(_variables(texts)),
        "attempts": [_of_attempt(verdict) for verdict in verdicts],
        "last line of each rank": _last_lines(logs.lines),
    }
    return {name: value for name, value in found.items() if value}


def _of_attempt(verdict: Verdict) -> dict[str, object]:
    """Return what is known of one attempt."""
    lines, root = verdict.seen.lines, verdict.root
    found: dict[str, object] = {
        "lines": f"{lines[0].number} to {lines[-1].number}" if lines else "none",
        "ranks": name_ranks(verdict.seen.ranks) if verdict.seen.ranks else "",
        "ended well": verdict.well,
    }
    if root:
        late = name_ranks(verdict.late) if verdict.late else ""
        first = f"rank {verdict.first} ({verdict.by})" if verdict.first is not None else ""
        found |= {
            "failed first": first,
            "not there when it was needed": late,
            "root": _place(root.lines[0]),
            "innermost frame": innermost_frame(lines, root.lines[0]),
            "own frame": verdict.place,
            "the message says": list(verdict.said),
            "failed besides": _once(_place(finding.lines[0]) for finding in verdict.others),
        }
    if root:
        before = lines[max(0, root.order - _LEADS) : root.order]
        found["lines that lead to the root"] = [*map(_place, before)]
    found["warnings"] = _once(_place(line) for line in lines if _WARNS.search(line.text))
    found["exceptions"] = _once(map(_place, final_lines(lines)))
    firsts: dict[int | None, Line] = {}
    for finding in verdict.seen.serious:
        firsts.setdefault(finding.rank, finding.lines[0])
    found["first failure of each rank"] = _once(
        _place(firsts[rank]) for rank in firsts if rank is not None
    )
    found["NCCL warns"] = _once(_place(line) for line in lines if "NCCL WARN" in line.text)
    found["endings"] = _once(_place(ending.line) for ending in verdict.seen.endings)
    return {name: value for name, value in found.items() if value}


def _once(values: Iterable[str]) -> list[str]:
    """List values once each, at most so many."""
    return list(dict.fromkeys(values))[:_MOST]


def _place(line: Line) -> str:
    rank = "" if line.rank is None else f"rank {line.rank}, "
    return f"{rank}line {line.number}: {cut(line.text.strip(), _LONGEST)}"


def _versions(texts: Sequence[str]) -> dict[str, list[str]]:
    found = {}
    for name, form in _VERSIONS.items():
        matches = (match for text in texts if (match := re.search(form, text)))
        found[name] = _once(next(filter(None, match.groups())) for match in matches)
    return {name: versions for name, versions in found.items() if versions}


def _variables(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if match := _SET.search(text):
            yield f"{match[1]}={match[2]}"
        found = _VARIABLE.findall(text)
        yield from (cut(f"{name}={value.rstrip(',.')}", _LONGEST) for name, value in found)


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
        short = [part for part in value if isinstance(part, str) and len(part) <= _SHORT]
        if short == value and len(short) <= _FEW:
            yield f"{indent}{', '.join(short)}"
            return
        for number, part in enumerate(value, start=1):
            if isinstance(part, dict):
                yield f"{indent}{number}."
                yield from _written(part, indent + "  ")
            else:
                yield f"{indent}{part}"
