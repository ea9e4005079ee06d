"""Find what the lines of a log say: messages that a rule knows, endings, exceptions, errors.

`judge` calls it, and orders what it finds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp_tools.explain.endings import Ending
from ddp_tools.explain.exceptions import complaints, error_lines, final_lines
from ddp_tools.explain.lines import Line
from ddp_tools.explain.rules import LEVELS, Rule, best_rule

# Lines that differ in their numbers alone: when so many are known to no rule, the others are not
# asked. A long log has hundreds of thousands of such lines, one for each step.
_ALIKE, _NUMBERS, _HEAD = 50, re.compile(r"\d+"), 300


@dataclass
class Finding:
    """A message of one rank: its rule, None for an exception that none knows, and its lines."""

    rule: Rule | None
    rank: int | None
    lines: list[Line]
    order: int  # of its first line among all lines
    status: int | None = None  # with which a process ended, where the launcher says it

    @property
    def level(self) -> int:
        """How near to the root it is."""
        return self.rule.level if self.rule else LEVELS["unknown"]


def known_messages(lines: Sequence[Line], rules: Sequence[Rule]) -> list[Finding]:
    """Find the lines that a rule knows, one finding for each rule and rank."""
    whole = "\n".join(line.text for line in lines)
    active = [rule for rule in rules if rule.may_match(whole)]
    findings: dict[tuple[str, int | None], Finding] = {}
    seen: dict[str, Rule | None] = {}
    unknown: Counter[str] = Counter()
    for order, line in enumerate(lines):
        form = _NUMBERS.sub("0", line.text[:_HEAD])
        if unknown[form] >= _ALIKE:
            continue
        if line.text not in seen:
            seen[line.text] = best_rule(active, line.text)
            unknown[form] += seen[line.text] is None
        if rule := seen[line.text]:
            key = rule.id, line.rank
            finding = findings.setdefault(key, Finding(rule, line.rank, [], order))
            finding.lines.append(line)
    return list(findings.values())


def known_endings(
    endings: Iterable[Ending], rules: Sequence[Rule], lines: Sequence[Line]
) -> list[Finding]:
    """Find the endings whose status a rule knows, one finding for each rule and rank."""
    by_status = {status: rule for rule in rules for status in rule.statuses}
    orders = {id(line): order for order, line in enumerate(lines)}
    findings: dict[tuple[str, int | None], Finding] = {}
    for ending in endings:
        if rule := by_status.get(ending.status):
            key = rule.id, ending.rank
            order = orders[id(ending.line)]
            new = Finding(rule, ending.rank, [], order, ending.status)
            findings.setdefault(key, new).lines.append(ending.line)
    return list(findings.values())


def unknown_exceptions(lines: Sequence[Line], known: Iterable[Finding]) -> list[Finding]:
    """Find the exceptions that no rule knows: the last lines of tracebacks."""
    explained = {id(line) for finding in known for line in finding.lines}
    orders = {id(line): order for order, line in enumerate(lines)}
    findings: dict[tuple[str, int | None], Finding] = {}
    for line in final_lines(lines):
        if id(line) not in explained:
            new = Finding(None, line.rank, [], orders[id(line)])
            findings.setdefault((line.text, line.rank), new).lines.append(line)
    return list(findings.values())


def last_warning(
    lines: Sequence[Line], findings: Iterable[Finding], rules: Sequence[Rule]
) -> Finding | None:
    """Explain a log that ends at a warning which is harmless unless nothing comes after it."""
    for finding in findings:
        last = lines[-1]
        if finding.rule and finding.rule.at_end and finding.lines[-1] is last:
            rule = best_rule([rule for rule in rules if rule.level >= 0], last.text)
            rule = rule or next(rule for rule in rules if rule.id == finding.rule.at_end)
            return Finding(rule, last.rank, [last], len(lines) - 1)
    return None


def unexplained_error(lines: Sequence[Line], findings: Iterable[Finding]) -> Finding | None:
    """Return an error that no rule knows, where a log has besides it only a launcher's summary."""
    explained = {id(line) for finding in findings for line in finding.lines}
    for line in complaints(lines):
        if id(line) not in explained:
            return Finding(None, line.rank, [line], lines.index(line))
    return None


def is_clean(lines: Sequence[Line], endings: Sequence[Ending]) -> bool:
    """Say whether nothing looks like a failure: no ending with a status, no line of an error."""
    return not endings and not error_lines(lines)


def plain_error(lines: Sequence[Line], endings: Sequence[Ending]) -> Finding:
    """Return what stands for a failure that neither a rule nor a traceback tells."""
    errors = error_lines(lines) or [endings[0].line]
    order = next(index for index, line in enumerate(lines) if line is errors[0])
    return Finding(None, errors[0].rank, errors[:1], order)
