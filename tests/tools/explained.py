"""Explain a log of a test, and say in one word what came of it."""

from pathlib import Path

from ddp_tools.explain.judge import Verdict, judge
from ddp_tools.explain.lines import read_logs


def explain(tmp_path: Path, text: str, name: str = "job.log") -> Verdict:
    """The verdict on a log of this text."""
    (tmp_path / name).write_text(text)
    return judge(read_logs([tmp_path / name]))


def answer(verdict: Verdict) -> str | None:
    """The id of the rule that explains a log; "clean" if no failure is seen, None for one that is not known."""
    if verdict.root is None:
        return "clean"
    return verdict.root.rule.id if verdict.root.rule else None
