"""Find what the lines of a log say: messages that a rule knows, endings, exceptions, errors.

`judge` asks it, and orders what it finds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ddp_tools.explain.endings import read_endings
from ddp_tools.explain.exceptions import (
    error_lines,
    final_lines,
    without_frames,
)
from ddp_tools.explain.lines import Line
from ddp_tools.explain.message import is_of_another
from ddp_tools.explain.rules import LEVELS, Rule, best_rule, load_rules

# Lines that differ in their numbers alone: when so many are known to no rule, the others are not
# asked. A long log has hundreds of thousands of such lines, one for each step.
_STEP = re.compile(r"(?i)\bloss\b\W{0,3}\d|\b(?:step|iter(?:ation)?)\W{1,2}\d+\b.*\d\.\d")
_ADDRESS = re.compile(r"(\([\w.-]+, \d+\))")
_MESSAGE = 8  # lines of an exception's message
_ALIKE, _NUMBERS, _HEAD = 50, re.compile(r"\d+"), 300


Told = tuple[Rule | None, int | None, Line]


@dataclass(frozen=True)
class Finding:
    """A message of one rank: its rule, None for an exception that none knows, and its lines."""

    rule: Rule | None
    rank: int | None
    order: int  # of its first line among all lines
    lines: list[Line] = field(default_factory=list)

    @property
    def level(self) -> int:
        """How near to the root it is."""
        return self.rule.level if self.rule else LEVELS["unknown"]

    @property
    def statuses(self) -> Sequence[int]:
        """The exit statuses of its rule: it is how a process ended, and no message."""
        return self.rule.statuses if self.rule else ()


class Evidence:
    """What the lines of a log say, read once.

    ranks: those that the lines name. endings: of processes, as launchers tell them. finals: the
    lines that name an exception. harmless: the warnings that a rule knows. serious: what else a
    rule knows, and exceptions that none knows.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        rules = load_rules()
        self.lines = lines
        self._orders = {id(line): order for order, line in enumerate(lines)}
        self._told: set[int] = set()  # the lines of all findings
        self.ranks = sorted({line.rank for line in lines if line.rank is not None})
        self.endings = list(read_endings(lines))
        self.finals = list(final_lines(lines))
        by_status = {status: rule for rule in rules for status in rule.statuses}
        ended = ((by_status.get(end.status), end.rank, end.line) for end in self.endings)
        findings = self._gather(self._in_time(_known(lines, rules), rules))
        findings += self._gather(row for row in ended if row[0])
        unknown = self._untold(self.finals)
        findings += self._gather((None, line.rank, line) for line in unknown)
        self.harmless = [finding for finding in findings if finding.level < 0]
        self.serious = [finding for finding in findings if finding.level >= 0]

    def _gather(self, told: Iterable[Told]) -> list[Finding]:
        """Join what a rank says several times: of a rule, or in the same words."""
        findings: dict[tuple[str, int | None], Finding] = {}
        for rule, rank, line in told:
            new = Finding(rule, rank, self._orders[id(line)])
            findings.setdefault((rule.id if rule else line.text, rank), new).lines.append(line)
            self._told.add(id(line))
        return list(findings.values())

    def _in_time(self, told: Iterable[Told], rules: Iterable[Rule]) -> Iterator[Told]:
        """Yield what is told; once training has begun, no message is one of its start."""
        by_id = {rule.id: rule for rule in rules}
        for rule, rank, line in told:
            late = rule and rule.later and self._orders[id(line)] > self._begun
            yield (by_id[rule.later] if rule and late else rule), rank, line

    @cached_property
    def _begun(self) -> int:
        """The order of the first line of a training step."""
        trained = (order for order, line in enumerate(self.lines) if _STEP.search(line.text))
        return next(trained, len(self.lines))

    def _untold(self, lines: Iterable[Line]) -> Iterator[Line]:
        return (line for line in lines if id(line) not in self._told)

    def _of(self, line: Line, rule: Rule | None = None) -> Finding:
        return Finding(rule, line.rank, self._orders[id(line)], [line])

    def is_of_another(self, finding: Finding) -> bool:
        """Say whether a finding tells of another rank: that it has gone, or did not come."""
        return finding.level <= LEVELS["waits"] or is_of_another(self.lines, finding.order)

    def exception_of(self, finding: Finding) -> int | None:
        """Return the place of the exception that a finding tells of; None if there is none.

        It is its own line, or one of its rank: just above it, in a message of several lines, or
        behind it, where a warning or a watchdog came first.
        """
        places = [self._orders[id(line)] for line in self.finals if line.rank == finding.rank]
        if finding.order in places:
            return finding.order
        above = [place for place in places if 0 < finding.order - place <= _MESSAGE]
        behind = [place for place in places if place > finding.order and finding.rank is not None]
        return next(iter([*above[-1:], *behind]), None)

    def in_words_of_nccl(self, finding: Finding, words: Line) -> Finding:
        """Return what stands for an error of NCCL: the line in which NCCL itself says more."""
        causes = (rule for rule in load_rules() if rule.level == LEVELS["cause"])
        rule = best_rule(causes, words.text)
        return Finding(rule, finding.rank, self._orders[id(words)], [words])

    def warned(self, root: Finding | None) -> Finding | None:
        """Return a warning, as a rule harmless, that the log ends at or that names the root's peer.

        Without a root it counts at the end of the log; else a root that waits is for an address.
        """
        rules = [rule for rule in load_rules() if rule.level >= 0]
        ends = [(finding.rule.at_end, finding.lines) for finding in self.harmless if finding.rule]
        for name, line in ((name, line) for name, lines in ends if name for line in lines):
            address = _ADDRESS.search(line.text) if root else None
            of_root = address and root and any(address[1] in it.text for it in root.lines)
            if of_root or (root is None and line is self.lines[-1]):
                by_name = (rule for rule in rules if rule.id == name)
                return self._of(line, best_rule(rules, line.text) or next(by_name))
        return None

    @cached_property
    def errors(self) -> list[Line]:
        """The lines that are errors by their form."""
        return error_lines(self.lines)

    @property
    def plain_error(self) -> Finding | None:
        """What stands for a failure that neither a rule nor a traceback tells."""
        lines = self.errors or [ending.line for ending in self.endings]
        return self._of(lines[0]) if lines else None

    @property
    def untold_error(self) -> Finding | None:
        """An error that no rule and no traceback explains."""
        return next(map(self._of, self._untold(self.errors)), None)


def _known(lines: Sequence[Line], rules: Iterable[Rule]) -> Iterator[Told]:
    """Yield each line that a rule knows, with the rule."""
    whole = "\n".join(line.text for line in lines)
    active = [rule for rule in rules if rule.may_match(whole)]
    seen: dict[str, Rule | None] = {}
    unknown: Counter[str] = Counter()
    for line in without_frames(lines):
        form = _NUMBERS.sub("0", line.text[:_HEAD])
        if unknown[form] >= _ALIKE:
            continue
        if line.text not in seen:
            seen[line.text] = best_rule(active, line.text)
            unknown[form] += seen[line.text] is None
        if rule := seen[line.text]:
            yield rule, line.rank, line
