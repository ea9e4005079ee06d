"""Judge what the lines of a log say: which finding is the root, which rank failed first.

`command` calls it, in one process, and `report` writes down what it found.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_tools.explain.exceptions import Raised, is_of_ranks, raised_at
from ddp_tools.explain.findings import Evidence, Finding
from ddp_tools.explain.lines import Line, Logs, is_next
from ddp_tools.explain.message import nccl_words, rank_of_warning, says
from ddp_tools.explain.rules import LEVELS
from ddp_tools.explain.watchdog import compare, name_ranks

_OWN_LINES = 6
_NOWHERE = Raised()
_TORCHRUN = "torchrun says so"
_WATCHDOG = "notebooks/10_break_it_and_fix_it.ipynb#watchdog"
# What says that a whole run ended well: our own record, or Slurm's state; no status of a rank.
_WELL = re.compile(
    r"^status\.json: (?:done|finished|completed)\b|\bJobState=COMPLETED\b|\bCOMPLETED\b.*\b0:0\b"
    r"|^State: COMPLETED|^COMPLETED\s*$"
)
_REFUSES = re.compile(r"s(?:batch|run|alloc): error: ")
_OF_SLURM = re.compile(r"(?:srun|slurmstepd|salloc): (?!.*[Ss]tep created)")


@dataclass(frozen=True)
class Verdict:
    """What a log comes to.

    root: what explains it, None where no failure was seen. first: the rank that failed first, and
    by: how that is known; None, and why it is not. late: ranks that did not come, or left without
    a word, as the others or their lines say.
    follows: what comes of the root, or says the same. others: what failed besides.
    own: the last lines of the root's rank. raised: the frames of the root's exception.
    said: sentences of the root's own message that name a cause or a fix.
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
    raised: Raised = _NOWHERE
    said: Sequence[str] = ()
    well: bool = False

    @property
    def plain(self) -> bool:
        """Say whether the root is an exception that the reader's own line raised."""
        root = self.root
        if root is None or root.rule or not self.raised.own or self.raised.package:
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
    failed = seen.endings or any("Traceback (most" in line.text for line in logs.lines)
    if root is None or (well and not failed):
        return Verdict(seen, well=well, others=seen.serious)
    first, late = _first(root, seen), _late(root, seen)
    follows, others = _rest(root, seen)
    at = seen.exception_of(root)
    raised = _NOWHERE if at is None else raised_at(seen.lines, at)
    rule, said = root.rule, says(seen.lines, root.order)
    if rule and rule.id.startswith("nccl-watchdog"):
        # The watchdogs' numbers together say more than the place of a line.
        told = compare(seen.lines, seen.ranks, late)
        if told:
            meaning, cure, late = told
            rule = replace(rule, meaning=meaning, cure=cure, causes=(), page=_WATCHDOG)
            root, first = replace(root, rule=rule), (None, "")
    own = _last_lines(seen.lines, root)
    return Verdict(seen, root, *first, late, follows, others, own, raised, said)


# ---- the root


def _root(seen: Evidence) -> Finding | None:
    """Return what explains the failure; None where no failure is seen."""
    strongest = _strongest(_by_themselves(_before_the_end(_not_swept(seen.serious)), seen))
    root = strongest or seen.warned(None) or seen.plain_error
    if root and root.level == LEVELS["ending"]:
        root = _before(root, seen)
    if root and root.level == LEVELS["waits"]:
        root = seen.warned(root) or root
    if root and root.level == LEVELS["summary"]:
        root = seen.untold_error or root
    if root and root.rank is None:
        root = replace(root, rank=rank_of_warning(seen.lines, root.lines))
    if root and _is_of_nccl(root) and (words := nccl_words(seen.lines, root.order, root.rank)):
        root = seen.in_words_of_nccl(root, words)
    return root


def _by_themselves(findings: Sequence[Finding], seen: Evidence) -> list[Finding]:
    """Leave out what tells that another process has gone, where another rank failed by itself.

    Whether a rule knows that rank's message counts for nothing.
    """
    strong = [finding for finding in findings if finding.level >= LEVELS["unknown"]]
    ranks = {finding.rank for finding in strong if not seen.is_of_another(finding)}
    return [
        finding
        for finding in findings
        if ranks <= {finding.rank} or not seen.is_of_another(finding)
    ]


def _is_of_nccl(finding: Finding) -> bool:
    """Say whether it is an error of NCCL that names no reason, or one that no rule knows."""
    vague = finding.level in (LEVELS["general"], LEVELS["unknown"])
    return vague and "nccl" in finding.lines[0].text.lower()


def _not_swept(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out a kill that comes after ranks had waited in vain: a launcher ends those left."""
    waits = [finding.order for finding in findings if finding.level == LEVELS["waits"]]
    killed = [f for f in findings if f.rank is None and -signal.SIGKILL in f.statuses]
    swept = [finding for finding in killed if waits and finding.order > min(waits)]
    return [finding for finding in findings if finding not in swept]


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


def _strongest(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding nearest to the root, of these the first by time, else by place.

    SIGTERM comes last: a launcher sends it to the others.
    """
    most = max((finding.level for finding in findings), default=0)
    top = [finding for finding in findings if finding.level == most]
    timed = all(finding.lines[0].time is not None for finding in top)

    def order(finding: Finding) -> tuple[bool, float, int]:
        time = finding.lines[0].time
        swept = -signal.SIGTERM in finding.statuses
        return swept, time if timed and time is not None else 0, finding.order

    return min(top, key=order, default=None)


# ---- the first rank, and the rest


def _late(root: Finding, seen: Evidence) -> Sequence[int]:
    """List the ranks that did not come, or left without a word."""
    if root.rule and (named := root.rule.named_ranks(root.lines[0].text)):
        return named
    complain = {finding.rank for finding in seen.serious if finding.level == root.level}
    if root.level not in (LEVELS["waits"], LEVELS["follows"]) or None in complain:
        return []
    return [rank for rank in seen.ranks if rank not in complain]


def _first(root: Finding, seen: Evidence) -> tuple[int | None, str]:
    """Say which rank failed first, and how that is known; None, and why not, without evidence."""
    named, by = _named(seen)
    of_another = [finding for finding in seen.serious if seen.is_of_another(finding)]
    if root.rank is None:  # who tells of another rank was not the first, whoever names it
        telling = {finding.rank for finding in of_another if not finding.statuses}
        return (min(named), by) if len(named) == 1 and not named & telling else (None, "")
    least = min(root.level, LEVELS["unknown"])
    failed = [f for f in seen.serious if f.level >= least and f.rank is not None]
    if root.level > LEVELS["waits"]:
        failed = [finding for finding in failed if finding not in of_another]
    ranks = {root.rank, *(finding.rank for finding in failed if finding.rank is not None)}
    names = f", and torchrun names {name_ranks(named)}" if by == _TORCHRUN else ""
    if named == {root.rank} and (names or len(ranks) > 1):
        return root.rank, by
    if not names and len(ranks) == 1:
        return root.rank, "in this log no other rank failed by itself"
    own, *times = [finding.lines[0].time for finding in (root, *failed)]
    if not names and own is not None and all(time is not None and own <= time for time in times):
        return root.rank, "by time"
    return None, f"the messages point to {name_ranks(ranks)}{names}"


def _named(seen: Evidence) -> tuple[set[int], str]:
    """Return the ranks that launchers name as the first one, and how they do."""
    ended = [ending for ending in seen.endings if ending.status != -signal.SIGTERM]
    ranks = [(ending.rank, ending.first) for ending in ended if ending.rank is not None]
    if named := {rank for rank, is_first in ranks if is_first}:
        return named, _TORCHRUN
    return {rank for rank, _ in ranks[:1]}, "the first of which its launcher speaks"


def _rest(root: Finding, seen: Evidence) -> tuple[list[Finding], list[Finding]]:
    """Return what only follows from the root, and what failed besides."""
    follows: list[Finding] = []
    others: list[Finding] = []
    besides = [finding for finding in seen.serious if finding.lines[0] is not root.lines[0]]
    for finding in sorted(besides, key=lambda finding: finding.order):
        same = finding.rule is root.rule and root.rule is not None
        # Slurm's end, such as a time limit, comes of what broke before it.
        same |= _is_slurms_end(finding) and root.order < finding.order
        # Slurm's program says two things of one refusal: why, and then what came of it.
        said = root.lines[-1], finding.lines[0]
        same |= is_next(*said) and all(_REFUSES.match(line.text) for line in said)
        same |= "NCCL WARN" in root.lines[0].text and _is_of_nccl(finding)
        weaker = seen.is_of_another(finding) or finding.level < root.level - 2
        (follows if same or weaker else others).append(finding)
    return follows, others


def _last_lines(lines: Sequence[Line], root: Finding) -> list[Line]:
    """Return the last lines of the root's rank; without one, those that lead to the root."""
    if root.rank is None:
        return list(lines[max(0, root.order - _OWN_LINES + 1) : root.order + 1])
    return [line for line in lines if line.rank == root.rank][-_OWN_LINES:]
