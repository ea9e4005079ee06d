"""One thing has one word, the field's: the losers are on no page, in no notebook, help text or docstring."""

import ast
import re
from collections.abc import Iterator

from pages import PAGES, prose

from ddp_helpers import ROOT
from ddp_helpers.cli import make_parser
from ddp_helpers.upkeep.front_page import NOTEBOOKS

LOSERS = {  # as a pattern: the word to use; CONTRIBUTING, *Style*, has the rules behind them
    r"mend(?:s|ed|ing)?": "fix",
    r"cure[sd]?": "fix",
    r"anew": "again",
    r"once more": "again",
    r"speed-ups?": "speedup",
    r"time-outs?": "timeout",
    r"pretend(?:s|ed)?": "simulate",
    r"harm(?:s|ed)?": "inject a fault",
    r"goes on": "resumes, continues",
    r"at last": "at the end",
    r"shall": "must, will",
    r"upon|thus|hence": "on, so",
    r"so many": "a number",
    r"makers?": "maintainer",
    r"in the place of": "instead of, replace",
    r"learner's process": "driver process",
    r"reading edition": "static HTML version",
    r"(?:tasks|ranks|GPUs) a node|images a second": "per node, per second",
}
LOSER = re.compile(rf"\b(?:{'|'.join(LOSERS)})\b", re.I)


def plain(text: str) -> str:
    """A text without code, the targets of links and quoted messages."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", text)


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of both packages, each with its file."""
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    for package in ("ddp_helpers", "ddp_tools"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found = [
                ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
            ]
            yield str(path.relative_to(ROOT)), "\n".join(filter(None, found))


def helps() -> Iterator[tuple[str, str]]:
    """What --help prints of each command."""
    [commands] = [action.choices for action in make_parser()._actions if action.dest == "command"]
    for name, command in commands.items():
        yield f"{name} --help", command.format_help()


def losers(texts: dict[str, str]) -> list[str]:
    """Each loser with the text that has it."""
    return [f"{name}: {word[0]}" for name, text in texts.items() for word in LOSER.finditer(plain(text))]


def test_no_text_that_people_read_has_a_word_that_lost() -> None:
    texts = {path.name: path.read_text() for path in PAGES}
    texts |= {number: prose(number) for number in NOTEBOOKS} | dict(helps()) | dict(docstrings())
    assert len(texts) > 200 and losers(texts) == []
    said = ("mended", "at last", "so many", "images a second", "time-out")
    wrong = "We mended it at last: so many images a second, and a time-out. `cure` and [it](#the-cure) are names."
    assert losers({"control": wrong}) == [f"control: {word}" for word in said]
