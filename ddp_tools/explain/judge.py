"""Judge what the lines of a log say: which finding is the root, which rank failed first.

`command` calls it, in one process, and `report` writes down what it found.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ddp_tools.explain.endings import Ending, read_endings
from ddp_tools.explain.exceptions import is_of_ranks, own_frame
from ddp_tools.explain.findings import (
    Finding,
    is_clean,
    known_endings,
    known_messages,
    last_warning,
    plain_error,
    unexplained_error,
    unknown_exceptions,
)
from ddp_tools.explain.lines import Line, Logs
from ddp_tools.explain.rules import LEVELS, Rule, load_rules
from ddp_tools.explain.watchdog import compare

_OWN_LINES = 6
_WATCHDOG = "notebooks/10_break_it_and_fix_it.ipynb#watchdog"
# What says that a whole run ended well: our own record, or Slurm's state; no status of a rank.
_WELL = re.compile(
    r"^status\.json: (?:done|finished|completed)\b|\bJobState=COMPLETED\b|\bCOMPLETED\b.*\b0:0\b"
    r"|^State: COMPLETED|^COMPLETED\s*$"
)
_OF_SLURM = re.compile(r"(?:srun|slurmstepd|salloc): (?!.*[Ss]tep created)")


@dataclass
class Verdict:
    """What a log comes to.

    root: what explains it, None where no failure was seen. first: the rank that failed first.
    late: ranks that did not come, or left
    without a word, as the others or their lines say. own: the last lines of the first rank.
    well: a line says that the run ended well. place: the reader's own line of the root's traceback.
    package: what raised the root's exception, "" where that line did it itself.
    """

    root: Finding | None
    first: int | None
    by: str
    late: list[int]
    own: list[Line]
    others: list[Finding] = field(default_factory=list)
    follows: list[Finding] = field(default_factory=list)
    harmless: list[Finding] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    well: bool = False
    place: str = ""
    package: str = ""

    @property
    def plain(self) -> bool:
        """Say whether the root is an exception that the reader's own line raised."""
        root = self.root
        if root is None or root.rule or not self.place or self.package:
            return False
        return not is_of_ranks(root.lines[0].text)

    @property
    def known(self) -> bool:
        """Say whether the root is explained: by a rule, or as the reader's own exception."""
        return self.root is not None and (self.root.rule is not None or self.plain)


def judge(logs: Logs, rules: Sequence[Rule] | None = None) -> Verdict:
    """Explain the logs by the rules."""
    rules = load_rules() if rules is None else rules
    endings = list(read_endings(logs.lines))
    findings = known_messages(logs.lines, rules) + known_endings(endings, rules, logs.lines)
    findings += unknown_exceptions(logs.lines, findings)
    serious = [finding for finding in findings if finding.level >= 0]
    root = _earliest(_strongest(_before_the_end(serious))) or last_warning(
        logs.lines, findings, rules
    )
    if root is None and not is_clean(logs.lines, endings):
        root = plain_error(logs.lines, endings)
    if root and root.level == LEVELS["ending"]:
        root = _before(root, findings, logs.lines)
    if root and root.level == LEVELS["summary"]:
        root = unexplained_error(logs.lines, findings) or root
    verdict = Verdict(root, None, "", [], [])
    verdict.ranks = sorted({line.rank for line in logs.lines if line.rank is not None})
    verdict.harmless = [finding for finding in findings if finding.level < 0]
    verdict.well = root is None and any(_WELL.search(line.text) for line in logs.lines)
    if root:
        line = root.lines[0]
        verdict.place, verdict.package = own_frame(logs.lines, line)
        _name_first(verdict, root, serious, endings)
        _sort_others(verdict, root, serious)
        if root.rule and root.rule.id.startswith("nccl-watchdog"):
            _compare_watchdogs(verdict, root, root.rule, logs.lines)
        verdict.own = _last_lines(logs.lines, verdict.first, root)
    return verdict


# ---- order


def _before_the_end(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out the errors without a reason that a log has behind the line by which Slurm ends it.

    A time limit or a preemption ends the ranks one after the other, and the last ones complain.
    """
    ends: dict[str, int] = {}
    for finding in findings:
        if _is_slurms_end(finding):
            file = finding.lines[0].file
            ends[file] = min(finding.order, ends.get(file, finding.order))
    unreasoned = (LEVELS["general"], LEVELS["unknown"])
    return [
        finding
        for finding in findings
        if finding.level not in unreasoned
        or finding.order < ends.get(finding.lines[0].file, finding.order + 1)
    ]


def _is_slurms_end(finding: Finding) -> bool:
    """Say whether it is a line by which Slurm ends the whole job."""
    rule = finding.rule
    return bool(rule and rule.section == "slurm-and-mpi" and rule.level == LEVELS["ending"])


def _before(root: Finding, findings: Iterable[Finding], lines: Sequence[Line]) -> Finding:
    """Return what had a run ended: what it waited for at its end, or Slurm's word to the step.

    Slurm ends a job that never began at its time limit; and it sends a signal to all processes of a
    step, of which a rank may die before its own handler has run.
    """
    if not _is_slurms_end(root):
        told = (f for f in findings if f.rule and f.rule.id == "slurm-step-cancelled")
        return next((finding for finding in told if finding.order < root.order), root)
    waits = {id(line): f for f in findings if f.level == LEVELS["waits"] for line in f.lines}
    for line in reversed(lines[: root.order]):
        if id(line) in waits:
            return waits[id(line)]
        if not _OF_SLURM.match(line.text):
            break
    return root


def _strongest(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings nearest to the root; SIGTERM last: a launcher sends it to the others."""
    most = max((finding.level for finding in findings), default=0)
    top = [finding for finding in findings if finding.level == most]
    return [f for f in top if not (f.rule and -signal.SIGTERM in f.rule.statuses)] or top


def _earliest(findings: Sequence[Finding]) -> Finding | None:
    """Return the first by time, where all have one, else by place."""
    timed = all(finding.lines[0].time is not None for finding in findings)
    return min(
        findings,
        key=lambda finding: (finding.lines[0].time if timed else 0, finding.order),
        default=None,
    )


def _name_first(
    verdict: Verdict, root: Finding, serious: Sequence[Finding], endings: Sequence[Ending]
) -> None:
    """Put into the verdict which rank failed first, how that is known, and who was late."""
    named = root.rule.named_ranks(root.lines[0].text) if root.rule else []
    summary = next((e for e in endings if e.first and e.rank is not None), None)
    if root.rank is not None:
        alike = any(f.rule is root.rule and f.rank not in (None, root.rank) for f in serious)
        order = "by its place in the log" if root.lines[0].time is None else "by time"
        verdict.first, verdict.by = root.rank, order if alike else "it alone says so"
    elif summary:
        verdict.first, verdict.by = summary.rank, "torchrun says so"
    else:
        ranks = [e.rank for e in endings if e.rank is not None and e.status != -15]
        ranks += [f.rank for f in serious if f.rank is not None]
        if ranks:
            verdict.first, verdict.by = ranks[0], "the first of which its launcher speaks"
    verdict.late = named
    if not named and root.level in (LEVELS["waits"], LEVELS["follows"]):
        complain = {f.rank for f in serious if f.level == root.level}
        if None not in complain and len(verdict.ranks) > 1:
            verdict.late = [rank for rank in verdict.ranks if rank not in complain]


def _compare_watchdogs(verdict: Verdict, root: Finding, rule: Rule, lines: Sequence[Line]) -> None:
    """Put into the verdict what the watchdogs' numbers say together: no place in the log does."""
    if compared := compare(lines, verdict.ranks):
        meaning, cure, verdict.late = compared
        root.rule = replace(rule, meaning=meaning, cure=cure, causes=(), page=_WATCHDOG)
        verdict.first, verdict.by = None, ""


def _sort_others(verdict: Verdict, root: Finding, serious: Sequence[Finding]) -> None:
    """Set what only follows apart from what failed besides."""
    ordered = sorted(serious, key=lambda finding: finding.order)
    for finding in ordered:
        if finding is root:
            continue
        same = finding.rule is root.rule and root.rule is not None
        # Slurm's end, such as a time limit, comes of what broke before it.
        same |= _is_slurms_end(finding) and root.order < finding.order
        same |= _is_next_of_slurm(root.lines[-1], finding.lines[0])
        if same or finding.level <= LEVELS["waits"] or finding.level < root.level - 2:
            verdict.follows.append(finding)
        else:
            verdict.others.append(finding)


def _is_next_of_slurm(line: Line, after: Line) -> bool:
    """Say whether Slurm's program says two things of one refusal: why, and then what came of it."""
    follows = (line.file, line.number + 1) == (after.file, after.number)
    return follows and all(
        re.match("s(?:batch|run|alloc): error: ", it.text) for it in (line, after)
    )


def _last_lines(lines: Sequence[Line], rank: int | None, root: Finding) -> list[Line]:
    """Return the last lines of the first rank; without ranks, those that lead to the root."""
    if rank is None or rank != root.rank:
        place = root.order
        return list(lines[max(0, place - _OWN_LINES + 1) : place + 1])
    own = [line for line in lines if line.rank == rank]
    return own[-_OWN_LINES:]
