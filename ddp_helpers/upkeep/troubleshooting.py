"""Write the tables of docs/troubleshooting.md from the rules of `explain`; the prose stays.

A table has the rules of its section that are for the page (`Rule.on_page`). All messages are in
docs/messages.md, in alphabetical order.

A maintainer runs it after a change of rules.toml, in one process:
`python -m ddp_helpers.upkeep.troubleshooting`. A comment on the page names the section of a table.
"""

import re
from collections.abc import Iterable, Sequence

from ddp_helpers import ROOT
from ddp_tools.explain.rules import Rule, load_rules

PAGE = ROOT / "docs" / "troubleshooting.md"
INDEX = ROOT / "docs" / "messages.md"
_HEAD = """# Messages, A to Z

This page is for you if you search for a message. It has all messages that
[explain](tools.md#explain-my-log) knows, written by `python -m ddp_helpers.upkeep.troubleshooting`
from `ddp_tools/explain/rules.toml`. `explain` prints their causes and complete fixes; the most
frequent messages are in [Troubleshooting](troubleshooting.md), by subject.

"""
# A comment, and the table below it, if it is there.
_TABLE = re.compile(r"<!-- rules: ([a-z0-9-]+) -->\n\n(?:\|.*\n)*")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _lines(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"{_row(cells)}\n" for cells in (head, ["---"] * len(head), *rows))


def _causes(rule: Rule) -> str:
    """Return the causes as a cell, the likeliest first; if there are none, the meaning."""
    return "; or ".join(rule.causes) or rule.meaning


def table(rules: Iterable[Rule]) -> str:
    """Return the table of the rules of one section.

    Raises ValueError if some of them have a `who` and others have none.
    """
    rules = list(rules)
    first = "message"
    if any(rule.silent for rule in rules):
        first = "you see"
    elif any(rule.who for rule in rules):
        if lacking := [rule.id for rule in rules if not rule.who]:
            others = f"the others of {rules[0].section}"
            raise ValueError(f"{', '.join(lacking)}: `who` is missing, which {others} have")
        first = "their message"
    head = (first, "cause", "fix")
    chosen = (rule for rule in rules if rule.on_page)
    return _lines(head, ((rule.message, _causes(rule), rule.cure) for rule in chosen))


def index(rules: Iterable[Rule]) -> str:
    """Return the page of all messages that a log can have, each with its meaning and its fix."""
    spoken = [rule for rule in rules if not rule.silent and (rule.message or rule.example)]
    shown = {rule.id: rule.message or f"`{rule.example}`" for rule in spoken}
    spoken.sort(key=lambda rule: (re.sub(r"^\W+", "", shown[rule.id]).casefold(), rule.id))
    rows = ((shown[rule.id], rule.meaning, _first_sentence(rule.cure)) for rule in spoken)
    return _HEAD + _lines(("message", "meaning", "fix"), rows).replace("](#", f"]({PAGE.name}#")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z`)])\. (?=[A-Z`])", text, maxsplit=1)[0]


def page(text: str, rules: Iterable[Rule]) -> str:
    """Return the page with new tables. Raises ValueError if a rule has no table."""
    by_section: dict[str, list[Rule]] = {}
    for rule in rules:
        by_section.setdefault(rule.section, []).append(rule)

    def written(match: re.Match[str]) -> str:
        return f"<!-- rules: {match[1]} -->\n\n{table(by_section.pop(match[1], []))}"

    text = _TABLE.sub(written, text)
    if by_section:
        raise ValueError(f"no table on {PAGE.name} for the sections {', '.join(by_section)}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), load_rules()))
    INDEX.write_text(index(load_rules()))
    print(f"wrote {PAGE.relative_to(ROOT)}, {INDEX.relative_to(ROOT)}")
