"""Find what the lines of a log say: messages that a rule knows, endings, exceptions, errors.

`judge` asks it, and orders what it finds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ddp_tools.explain.endings import read_endings
from ddp_tools.explain.exceptions import complaints, error_lines, final_lines
from ddp_tools.explain.lines import Line
from ddp_tools.explain.rules import LEVELS, Rule, best_rule, load_rules

# Lines that differ in their numbers alone: when so many are known to no rule, the others are not
# asked. A long log has hundreds of thousands of such lines, one for each step.
_ALIKE, _NUMBERS, _HEAD = 50, re.compile(r"\d+"), 300


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


class Evidence:
    """What the lines of a log say, read once.

    ranks: those that the lines name. endings: of processes, as launchers tell them. harmless: the
    warnings that a rule knows. serious: what else a rule knows, and exceptions that none knows.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        rules = load_rules()
        self.lines = lines
        self._orders = {id(line): order for order, line in enumerate(lines)}
        self._told: set[int] = set()  # the lines of all findings
        self.ranks = sorted({line.rank for line in lines if line.rank is not None})
        self.endings = list(read_endings(lines))
        by_status = {status: rule for rule in rules for status in rule.statuses}
        ended = ((by_status.get(end.status), end.rank, end.line) for end in self.endings)
        findings = self._gather(_known(lines, rules))
        findings += self._gather(row for row in ended if row[0])
        unknown = self._untold(final_lines(lines))
        findings += self._gather((None, line.rank, line) for line in unknown)
        self.harmless = [finding for finding in findings if finding.level < 0]
        self.serious = [finding for finding in findings if finding.level >= 0]

    def _gather(self, told: Iterable[tuple[Rule | None, int | None, Line]]) -> list[Finding]:
        """Join what a rank says several times: of a rule, or in the same words."""
        findings: dict[tuple[str, int | None], Finding] = {}
        for rule, rank, line in told:
            new = Finding(rule, rank, self._orders[id(line)])
            findings.setdefault((rule.id if rule else line.text, rank), new).lines.append(line)
            self._told.add(id(line))
        return list(findings.values())

    def _untold(self, lines: Iterable[Line]) -> Iterator[Line]:
        return (line for line in lines if id(line) not in self._told)

    def _of(self, line: Line, rule: Rule | None = None) -> Finding:
        return Finding(rule, line.rank, self._orders[id(line)], [line])

    @cached_property
    def errors(self) -> list[Line]:
        """The lines that are errors by their form."""
        return error_lines(self.lines)

    @property
    def last_warning(self) -> Finding | None:
        """A warning that is harmless unless nothing comes after it, where the log ends at it."""
        for finding in self.harmless:
            last = self.lines[-1]
            if finding.rule and finding.rule.at_end and finding.lines[-1] is last:
                rules = load_rules()
                rule = best_rule([rule for rule in rules if rule.level >= 0], last.text)
                ends = (rule for rule in rules if rule.id == finding.rule.at_end)
                return self._of(last, rule or next(ends))
        return None

    @property
    def plain_error(self) -> Finding | None:
        """What stands for a failure that neither a rule nor a traceback tells."""
        lines = self.errors or [ending.line for ending in self.endings]
        return self._of(lines[0]) if lines else None

    @property
    def complaint(self) -> Finding | None:
        """An error in any program's words that no rule and no traceback explains."""
        return next(map(self._of, self._untold(complaints(self.lines))), None)


def _known(lines: Iterable[Line], rules: Iterable[Rule]) -> Iterator[tuple[Rule, int | None, Line]]:
    """Yield each line that a rule knows, with the rule."""
    whole = "\n".join(line.text for line in lines)
    active = [rule for rule in rules if rule.may_match(whole)]
    seen: dict[str, Rule | None] = {}
    unknown: Counter[str] = Counter()
    for line in lines:
        form = _NUMBERS.sub("0", line.text[:_HEAD])
        if unknown[form] >= _ALIKE:
            continue
        if line.text not in seen:
            seen[line.text] = best_rule(active, line.text)
            unknown[form] += seen[line.text] is None
        if rule := seen[line.text]:
            yield rule, line.rank, line
