"""Judge what the lines of a log say: which finding is the root, which rank failed first.

`command` calls it, in one process, and `report` writes down what it found.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddp_tools.explain.exceptions import is_of_ranks, own_frame
from ddp_tools.explain.findings import Evidence, Finding
from ddp_tools.explain.lines import Line, Logs
from ddp_tools.explain.message import nccl_words, says
from ddp_tools.explain.rules import LEVELS
from ddp_tools.explain.watchdog import compare

_OWN_LINES = 6
_WATCHDOG = "notebooks/10_break_it_and_fix_it.ipynb#watchdog"
# What says that a whole run ended well: our own record, or Slurm's state; no status of a rank.
_WELL = re.compile(
    r"^status\.json: (?:done|finished|completed)\b|\bJobState=COMPLETED\b|\bCOMPLETED\b.*\b0:0\b"
    r"|^State: COMPLETED|^COMPLETED\s*$"
)
_OF_SLURM = re.compile(r"(?:srun|slurmstepd|salloc): (?!.*[Ss]tep created)")


class First(NamedTuple):
    """Which rank failed first, and how that is known.

    late: ranks that did not come, or left without a word, as the others or their lines say.
    """

    rank: int | None
    by: str
    late: Sequence[int]


@dataclass(frozen=True)
class Verdict:
    """What a log comes to.

    root: what explains it, None where no failure was seen. first, by, late: as in `First`.
    follows: what comes of the root, or says the same. others: what failed besides.
    own: the last lines of the first rank. place: the reader's own line of the root's traceback.
    package: what raised the root's exception, "" where that line did it itself.
    said: sentences of the root's own message that name a cause or a cure.
    well: all was read, and a line says that the run ended well.
    """

    seen: Evidence
    root: Finding | None = None
    first: int | None = None
    by: str = ""
    late: Sequence[int] = ()
    follows: Sequence[Finding] = ()
    others: Sequence[Finding] = ()
    own: Sequence[Line] = ()
    place: str = ""
    package: str = ""
    said: Sequence[str] = ()
    well: bool = False

    @property
    def plain(self) -> bool:
        """Say whether the root is an exception that the reader's own line raised."""
        root = self.root
        if root is None or root.rule or not self.place or self.package:
            return False
        return not is_of_ranks(root.lines[0].text)

    @property
    def known(self) -> bool:
        """Say whether the root is explained: by a rule, by its own words, or as the reader's."""
        return self.root is not None and bool(self.root.rule or self.said or self.plain)


def judge(logs: Logs) -> Verdict:
    """Explain the logs by the rules."""
    seen = Evidence(logs.lines)
    root = _root(seen)
    well = logs.whole and any(_WELL.search(line.text) for line in logs.lines)
    if root is None or (well and not seen.has_failed):
        return Verdict(seen, well=well, others=seen.serious)
    first = _first(root, seen)
    follows, others = _rest(root, seen.serious)
    place, package = own_frame(seen.lines, root.lines[0])
    rule, said = root.rule, says(seen.lines, root.lines[0])
    if rule and rule.id.startswith("nccl-watchdog") and (told := compare(seen.lines, seen.ranks)):
        # The watchdogs' numbers together say more than the place of a line.
        meaning, cure, late = told
        rule = replace(rule, meaning=meaning, cure=cure, causes=(), page=_WATCHDOG)
        root, first = replace(root, rule=rule), First(None, "", late)
    own = _last_lines(seen.lines, first.rank, root)
    return Verdict(seen, root, *first, follows, others, own, place, package, said)


# ---- the root


def _root(seen: Evidence) -> Finding | None:
    """Return what explains the failure; None where no failure is seen."""
    strongest = _strongest(_before_the_end(_not_swept(seen.serious)))
    root = _earliest(strongest) or seen.last_warning or seen.plain_error
    if root and root.level == LEVELS["ending"]:
        root = _before(root, seen)
    if root and root.level == LEVELS["waits"]:
        root = seen.unknown_name(root) or root
    if root and root.level == LEVELS["summary"]:
        root = seen.complaint or root
    if root and _is_of_nccl(root) and (words := nccl_words(seen.lines, root.lines[0])):
        root = seen.in_words_of_nccl(root, words)
    return root


def _is_of_nccl(finding: Finding) -> bool:
    """Say whether it is an error of NCCL that names no reason, or one that no rule knows."""
    vague = finding.level in (LEVELS["general"], LEVELS["unknown"])
    return vague and "nccl" in finding.lines[0].text.lower()


def _not_swept(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out a kill that comes after ranks had waited in vain: a launcher ends those left."""
    waits = [finding.order for finding in findings if finding.level == LEVELS["waits"]]
    return [
        finding
        for finding in findings
        if not (waits and finding.order > min(waits) and finding.rank is None and _is_kill(finding))
    ]


def _is_kill(finding: Finding) -> bool:
    return bool(finding.rule and -signal.SIGKILL in finding.rule.statuses)


def _before_the_end(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out the errors without a reason that a log has behind the line by which Slurm ends it.

    A time limit or a preemption ends the ranks one after the other, and the last ones complain.
    """
    ends: dict[str, int] = {}
    for finding in filter(_is_slurms_end, findings):
        file = finding.lines[0].file
        ends[file] = min(finding.order, ends.get(file, finding.order))
    return [
        finding
        for finding in findings
        if finding.level not in (LEVELS["general"], LEVELS["unknown"])
        or finding.order < ends.get(finding.lines[0].file, finding.order + 1)
    ]


def _is_slurms_end(finding: Finding) -> bool:
    """Say whether it is a line by which Slurm ends the whole job."""
    rule = finding.rule
    return bool(rule and rule.section == "slurm-and-mpi" and rule.level == LEVELS["ending"])


def _before(root: Finding, seen: Evidence) -> Finding:
    """Return what had a run ended: what it waited for at its end, or Slurm's word to the step.

    Slurm ends a job that never began at its time limit; and it sends a signal to all processes of a
    step, of which a rank may die before its own handler has run.
    """
    if not _is_slurms_end(root):
        told = (f for f in seen.serious if f.rule and f.rule.id == "slurm-step-cancelled")
        return next((finding for finding in told if finding.order < root.order), root)
    waits = {id(line): f for f in seen.serious if f.level == LEVELS["waits"] for line in f.lines}
    for line in reversed(seen.lines[: root.order]):
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


# ---- the first rank, and the rest


def _first(root: Finding, seen: Evidence) -> First:
    """Say which rank failed first, how that is known, and who was late."""
    late: Sequence[int] = root.rule.named_ranks(root.lines[0].text) if root.rule else []
    if not late and root.level in (LEVELS["waits"], LEVELS["follows"]):
        complain = {f.rank for f in seen.serious if f.level == root.level}
        if None not in complain and len(seen.ranks) > 1:
            late = [rank for rank in seen.ranks if rank not in complain]
    if root.rank is not None:
        alike = any(f.rule is root.rule and f.rank not in (None, root.rank) for f in seen.serious)
        order = "by its place in the log" if root.lines[0].time is None else "by time"
        return First(root.rank, order if alike else "it alone says so", late)
    ended = [ending for ending in seen.endings if ending.rank is not None]
    for ending in ended:
        if ending.first:
            return First(ending.rank, "torchrun says so", late)
    ranks = [ending.rank for ending in ended if ending.status != -signal.SIGTERM]
    ranks += [finding.rank for finding in seen.serious if finding.rank is not None]
    if ranks:
        return First(ranks[0], "the first of which its launcher speaks", late)
    return First(None, "", late)


def _rest(root: Finding, serious: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return what only follows from the root, and what failed besides."""
    follows: list[Finding] = []
    others: list[Finding] = []
    besides = [finding for finding in serious if finding is not root]
    for finding in sorted(besides, key=lambda finding: finding.order):
        same = finding.rule is root.rule and root.rule is not None
        # Slurm's end, such as a time limit, comes of what broke before it.
        same |= _is_slurms_end(finding) and root.order < finding.order
        same |= _is_next_of_slurm(root.lines[-1], finding.lines[0])
        same |= "NCCL WARN" in root.lines[0].text and _is_of_nccl(finding)
        weaker = finding.level <= LEVELS["waits"] or finding.level < root.level - 2
        (follows if same or weaker else others).append(finding)
    return follows, others


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
