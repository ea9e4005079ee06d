"""The rules by which a log is explained: an entry of `rules.toml` for each known message.

`judge` asks them of each line. docs/troubleshooting.md is written from those of them that people
look up: all that this course says, and of others' messages the ones that `Rule.on_page` chooses.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_RULES = Path(__file__).with_name("rules.toml")
HOLE = "…"  # in a message and in a pattern: what differs from case to case
# What a message says of its run, from the strongest to the weakest. The highest one is the root.
LEVELS = {
    "cause": 6,  # why something failed
    "general": 5,  # an error that names no reason: any cause is better
    "unknown": 4,  # an exception that no rule knows
    "ending": 3,  # a process was ended by a signal or a time limit
    "waits": 2,  # this rank waited in vain for another one
    "follows": 1,  # another rank has gone
    "summary": 0,  # a launcher says that some rank failed
    "harmless": -1,  # a warning
}
_QUOTED = re.compile(r"`([^`]+)`")
_OFTEN = 3  # public threads that had a message, from which on it has a row on the page
_SHORTEST = 6  # letters of a quoted piece that can be told from other words


@dataclass(frozen=True, slots=True)
class Rule:
    """A message: how it is known, what it means, its causes, the likeliest first, and a fix.

    message: as the page shows it, literal pieces between backticks.
    patterns: pieces with … for what differs; those of the message unless given. They match a line
        that holds the pieces in this order.
    regexes: for what no literal piece can tell.
    unless: pieces of lines that are something else.
    within: a regex; the rule counts only in a log in which it matches.
    statuses: exit statuses of a process, below 0 for a signal.
    names_rank: a regex whose first group is the number of the rank at fault.
    page: where one can read more, if not at the message on docs/troubleshooting.md.
    source, seen: who had it, and where it was read or seen, with the version.
    who: the file of an installed library that says it, or the program; empty for the course.
    asked: how many public threads and pages had it: those of `source`, and those of tests/logs.
    example: a line of a log that this rule knows; the message is one unless given.
    says_cure: the message itself says what to do, or the fix is common knowledge of Linux, so that
        nobody needs to look it up.
    silent: something that one sees, and no line of a log says.
    at_end: of a warning that is harmless unless the log ends there, the rule that explains it then.
    later: of what speaks of a start, the rule that explains it once training has begun.
    """

    id: str
    section: str
    kind: str
    meaning: str
    cure: str
    message: str = ""
    causes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    within: str = ""
    statuses: tuple[int, ...] = ()
    names_rank: str = ""
    page: str = ""
    source: str = ""
    seen: str = ""
    who: str = ""
    asked: int = 0
    example: str = ""
    says_cure: bool = False
    silent: bool = False
    at_end: str = ""
    later: str = ""

    @property
    def level(self) -> int:
        """How near to the root of a failure it is."""
        return LEVELS[self.kind]

    @property
    def on_page(self) -> bool:
        """Whether docs/troubleshooting.md has a row for it.

        It has one if the course prints it, if a notebook treats it, or if it was asked about
        often; but not if nobody needs to look it up. `explain` knows the others as well.
        """
        texts = (self.page, self.meaning, *self.causes, self.cure)
        taught = any("notebooks/" in text for text in texts)
        return not self.says_cure and (not self.who or self.asked >= _OFTEN or taught)

    def match(self, text: str) -> int:
        """Count the letters of a line by which this rule knows it; 0 if it does not."""
        if any(piece in text for piece in self.unless):
            return 0
        lengths = [_matched(pieces, text) for pieces in literal_pieces(self)]
        for regex in self.regexes:
            match = _compiled(regex).search(text)
            lengths.append(len(match[0]) if match else 0)
        return max(lengths, default=0)

    def may_match(self, text: str) -> bool:
        """Say whether a long text can hold a line that this rule matches; quick."""
        if self.within and not _compiled(self.within).search(text):
            return False
        if self.regexes:
            return True
        return any(all(piece in text for piece in pieces) for pieces in literal_pieces(self))

    def named_ranks(self, text: str) -> list[int]:
        """List the ranks that the line itself says are at fault."""
        match = _compiled(self.names_rank).search(text) if self.names_rank else None
        return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


@cache
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


@cache
def literal_pieces(rule: Rule) -> tuple[tuple[str, ...], ...]:
    """Return the patterns of a rule, each as its pieces between what differs."""
    patterns = rule.patterns
    if not (patterns or rule.regexes or rule.statuses or rule.silent):
        patterns = tuple(_QUOTED.findall(rule.message))
    pieces = [tuple(filter(None, pattern.split(HOLE))) for pattern in patterns]
    return tuple(group for group in pieces if len("".join(group)) >= _SHORTEST)


def _matched(pieces: Iterable[str], text: str) -> int:
    """Count the letters of pieces that stand in the text in this order; 0 if one does not."""
    place = length = 0
    for piece in pieces:
        place = text.find(piece, place)
        if place < 0:
            return 0
        place += len(piece)
        length += len(piece)
    return length


@cache
def load_rules() -> tuple[Rule, ...]:
    """Read all rules, in the order of the file.

    Raises ValueError at an entry that cannot be used.
    """
    entries = tomllib.loads(_RULES.read_text(encoding="utf-8"))["rule"]
    rules = []
    for entry in entries:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        rule = Rule(**values)
        if rule.kind not in LEVELS or rule.kind == "unknown":
            raise ValueError(f"rule {rule.id}: kind {rule.kind!r} is none of {', '.join(LEVELS)}")
        rules.append(rule)
    return tuple(rules)


# A line may report another one's words: "watchdog terminated with exception: CUDA error: …".
_REPORTS = {"general": 1, "follows": 2, "summary": 2}


def best_rule(rules: Iterable[Rule], text: str) -> Rule | None:
    """Return the rule that knows this line by the most letters.

    One that says why comes before one that is general, and both before one that reports others.
    """
    matches = [(rule, length) for rule in rules if (length := rule.match(text))]
    if not matches:
        return None
    return max(matches, key=lambda match: (-_REPORTS.get(match[0].kind, 0), match[1]))[0]
