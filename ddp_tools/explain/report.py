"""Write down a verdict on a log: for a person to read, or as JSON.

`command` prints what it returns.
"""

import re
import textwrap
from collections.abc import Sequence

from ddp_tools import printable
from ddp_tools.explain.attempts import world_sizes
from ddp_tools.explain.findings import Finding
from ddp_tools.explain.judge import Verdict
from ddp_tools.explain.lines import Line, Logs
from ddp_tools.explain.rules import Rule
from ddp_tools.explain.watchdog import name_ranks

_WIDTH = 100
_LONGEST = 160  # letters of a line of a log
_MOST_LATE = 4  # ranks that did not come, of which lines are shown
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_PAGE = "docs/troubleshooting.md"


def page_of(rule: Rule) -> str:
    """Return where one can read more: the rule's own place, or its row on the page, or nothing."""
    return rule.page or (f"{_PAGE}#{rule.section}" if rule.on_page else "")


def _plain(text: str) -> str:
    """Take Markdown's links out of a text: it is read in a terminal."""
    return _LINK.sub(r"\1", text)


def as_text(verdicts: Sequence[Verdict], logs: Logs) -> str:
    """Return the report for a person: what was read, then the verdict on each attempt."""
    lines = [_read(verdicts, logs), *(f"note: {notice}" for notice in logs.notices)]
    attempts = enumerate(verdicts, start=1) if len(verdicts) > 1 else ()
    sizes = {n: ", ".join(world_sizes(verdict.seen.lines)) for n, verdict in attempts}
    if len(set(filter(None, sizes.values()))) > 1:
        of_each = (f"{size} in attempt {n}" for n, size in sizes.items() if size)
        lines.append(f"note: the world size is {', '.join(of_each)}: a file of each rank fits one")
    lines.append("")
    for number, verdict in enumerate(verdicts, start=1):
        if len(verdicts) > 1:
            lines_of_it = verdict.seen.lines
            place = f"lines {lines_of_it[0].number} to {lines_of_it[-1].number}"
            lines += [*[""] * (number > 1), f"== Attempt {number} of {len(verdicts)}: {place}", ""]
        lines += _judged(verdict, logs)
    return "\n".join(lines)


def _judged(verdict: Verdict, logs: Logs) -> list[str]:
    """Return the lines on one attempt."""
    if verdict.root is None:
        ended = f"{'a line' if verdict.well else 'nothing'} says that the run ended well"
        ended = ended if logs.whole else "not all was read"
        lines = [f"No failure is seen, and {ended}."]
        if verdict.others:
            lines += ["", "What it met on its way:"]
        for finding in verdict.others:
            lines += _indented("  ", _where(finding))
        return [*lines, *_harmless(verdict)]
    lines = _first(verdict)
    raised = verdict.raised
    if raised.own and raised.package:
        where = f"Raised in {raised.package}, reached from your line {raised.own}"
        lines += _indented("", where)
    elif raised.own:
        lines += _indented("", f"Your own line in its traceback: {raised.own}")
    said = [line for each in verdict.said for line in _indented("  says:   ", cut(each, 400))]
    if verdict.root.rule:
        where, *explained = _explained(verdict.root)
        lines += [where, *said, *explained]
    elif said:
        lines += [*_indented("", _where(verdict.root)), *said]
    elif verdict.plain:
        lines += _indented("", _where(verdict.root))
        lines += _indented("  means:  ", "a Python exception that your own code raised")
        cure = f"read {raised.own}. If one process alone fails there too, ranks have no part in it"
        lines += _indented("  fix:    ", cure)
    else:
        lines += _not_known(verdict)
    for finding in verdict.others:
        lines += ["", "Also seen:"]
        lines += _explained(finding) if finding.rule else _indented("  ", _where(finding))
    if verdict.follows:
        lines += ["", "Consequences and repeats:"]
        for finding in verdict.follows:
            lines += _indented("  ", _where(finding))
    return [*lines, *_harmless(verdict)]


def _read(verdicts: Sequence[Verdict], logs: Logs) -> str:
    """Say what was read."""
    files = logs.files[0] if len(logs.files) == 1 else f"{len(logs.files)} files"
    seen = {rank for verdict in verdicts for rank in verdict.seen.ranks}
    ranks = name_ranks(seen) if seen else "without ranks' names"
    return f"Read {files}: {logs.count:,} lines, {ranks}."


def _first(verdict: Verdict) -> list[str]:
    """Say which rank failed first, and what the root's rank and those that did not come wrote."""
    root, lines = verdict.root, []
    assert root is not None
    if verdict.first is not None:
        lines.append(f"Failed first: rank {verdict.first} ({verdict.by}).")
    elif verdict.by:
        lines.append(f"Which rank failed first is not known: {verdict.by}.")
    if verdict.late:
        lines.append(f"Not there when it was needed: {name_ranks(verdict.late)}. Look there first.")
    for rank in verdict.late[:_MOST_LATE]:
        before = [line for line in verdict.seen.lines[: root.order] if line.rank == rank]
        lines += [f"  rank {rank}, line {it.number} | {cut(it.text)}" for it in before[-2:]]
    owner = "The lines that lead to it"
    if root.rank is not None:
        owner = "Its last lines" if root.rank == verdict.first else f"Rank {root.rank}'s last lines"
    lines.append(f"{owner}:" if verdict.own else f"{owner}: none are in this log.")
    lines += [f"  | {cut(line.text)}" for line in verdict.own]
    return [*lines, ""]


def _explained(finding: Finding) -> list[str]:
    """Explain a finding by its rule."""
    rule = finding.rule
    assert rule is not None
    lines = [_where(finding)]
    lines += _indented("  means:  ", rule.meaning)
    for number, cause in enumerate(rule.causes, start=1):
        lines += _indented("  causes: " if number == 1 else "          ", f"{number}. {cause}")
    lines += _indented("  fix:    ", rule.cure)
    if page := page_of(rule):
        lines += _indented("  more:   ", page)
    # The version is that of the rule, not of the reader's log.
    known = (f"from {rule.source}" * bool(rule.source), f"seen with {rule.seen}" * bool(rule.seen))
    lines += _indented("  rule:   ", "; ".join(filter(None, known)))
    return lines


def _not_known(verdict: Verdict) -> list[str]:
    """Say plainly that no rule knows a failure, and which lines to look at."""
    root, seen = verdict.root, verdict.seen
    assert root is not None
    lines = ["Not known: no rule has this message. The lines to look at:"]
    at = seen.exception_of(root)
    follows = {id(line) for finding in verdict.follows for line in finding.lines}
    errors = [line for line in seen.errors if id(line) not in follows]
    looked_at = [root.lines[0], *([] if at is None else [seen.lines[at]]), *errors[:3]]
    for line in dict.fromkeys(looked_at):
        lines += _indented("  ", f"{line.file}:{line.number}: {cut(line.text)}")
    return lines


def _harmless(verdict: Verdict) -> list[str]:
    """List the warnings that may be left alone."""
    rules = {finding.rule.id: finding.rule for finding in verdict.seen.harmless if finding.rule}
    if not rules:
        return []
    lines = ["", "Warnings that are not the failure:"]
    for rule in rules.values():
        lines += _indented("  ", f"{rule.meaning}; {rule.cure}")
    return lines


def _where(finding: Finding) -> str:
    """Return the first line of a finding, with its rank and place."""
    line = finding.lines[0]
    rank = "" if finding.rank is None else f"rank {finding.rank}, "
    times = f", {len(finding.lines)} times" if len(finding.lines) > 1 else ""
    return f"{rank}{line.file}:{line.number}{times}: {cut(line.text)}"


def cut(text: str, longest: int = _LONGEST) -> str:
    """Cut a long line of a log, and take out what a terminal would obey."""
    text = printable(text.rstrip())
    return text if len(text) <= longest else f"{text[:longest]} …"


def _indented(begin: str, text: str) -> list[str]:
    """Wrap a text; its lines are as far in as the words of its first one."""
    indent = " " * len(begin)
    wrapper = textwrap.TextWrapper(_WIDTH, begin, indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(_plain(text))


# ---- for a machine


def as_data(verdict: Verdict, logs: Logs) -> dict[str, object]:
    """Return the verdict as values of JSON."""
    state = "explained"
    if verdict.root is None:
        state = "ended well" if verdict.well else "no failure seen"
    if verdict.root and not verdict.known:
        state = "not known"
    return {
        "verdict": state,
        "files": logs.files,
        "notices": logs.notices,
        "ranks": verdict.seen.ranks,
        "first_failed": verdict.first,
        "first_failed_by": verdict.by,
        "not_there": verdict.late,
        "own_line": verdict.raised.own,
        "raised_in": verdict.raised.package,
        "says": list(verdict.said),
        "last_lines": [line.text for line in verdict.own],
        "root": _data_of(verdict.root) if verdict.root else None,
        "others": list(map(_data_of, verdict.others)),
        "follows": list(map(_data_of, verdict.follows)),
        "harmless": list(map(_data_of, verdict.seen.harmless)),
    }


def _data_of(finding: Finding) -> dict[str, object]:
    """Return a finding, with what its rule says."""
    line: Line = finding.lines[0]
    data: dict[str, object] = {
        "rule": finding.rule.id if finding.rule else None,
        "rank": finding.rank,
        "file": line.file,
        "line": line.number,
        "text": line.text,
        "times": len(finding.lines),
    }
    if rule := finding.rule:
        data |= {"kind": rule.kind, "meaning": _plain(rule.meaning), "cure": _plain(rule.cure)}
        data |= {"causes": [_plain(cause) for cause in rule.causes], "page": page_of(rule)}
        data |= {"source": rule.source, "seen": rule.seen}
    return data
