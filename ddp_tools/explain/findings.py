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
_STEP = re.compile(r"(?i)\bloss\b\W{0,3}\d|\b(?:step|iter(?:ation)?)\W{1,2}\d+\b.*\d\.\d")
_NO_ADDRESS = re.compile(r"addresses of (\([^()]+, \d+\)) cannot be retrieved")
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
        findings = self._gather(self._in_time(_known(lines, rules), rules))
        findings += self._gather(row for row in ended if row[0])
        unknown = self._untold(final_lines(lines))
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

    def in_words_of_nccl(self, finding: Finding, words: Line) -> Finding:
        """Return what stands for an error of NCCL: the line in which NCCL itself says more."""
        causes = (rule for rule in load_rules() if rule.level == LEVELS["cause"])
        rule = best_rule(causes, words.text)
        return Finding(rule, finding.rank, self._orders[id(words)], [words])

    def unknown_name(self, finding: Finding) -> Finding | None:
        """Return the warning that a name has no address, if a rank waits for that very address."""
        by_id = {rule.id: rule for rule in load_rules()}
        waits = [line.text for f in self.serious if f.level == finding.level for line in f.lines]
        for line in (line for harmless in self.harmless for line in harmless.lines):
            address = _NO_ADDRESS.search(line.text)
            if address and any(address[1] in text for text in waits):
                return self._of(line, by_id["name-not-resolved"])
        return None

    @cached_property
    def has_failed(self) -> bool:
        """Whether a process ended with a status that is not 0, or an exception ended one."""
        return bool(self.endings) or any("Traceback (most" in line.text for line in self.lines)

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


def _known(lines: Iterable[Line], rules: Iterable[Rule]) -> Iterator[Told]:
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
