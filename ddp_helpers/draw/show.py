"""Show source where it is talked about: helpers, scripts, and the difference between two scripts."""

import difflib
import inspect
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from ddp_helpers.launch.screen import tidy
from ddp_helpers.launch.sources import Source

# Colours in the text itself: a code host and a static page have no style sheet of ours. Dark on light in any theme.
LOOK = (
    "background:#f6f6f6;color:#222;padding:0.5em;line-height:1.35;overflow-x:auto;white-space:pre;font-family:monospace"
)


class Code:
    """A block of code that shows itself highlighted, and as plain text where that is not possible."""

    def __init__(self, text: str, language: str = "python") -> None:
        self.text, self.language = text.rstrip(), language

    def _repr_html_(self) -> str:
        formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=LOOK)
        return highlight(self.text, get_lexer_by_name(self.language), formatter)

    def __repr__(self) -> str:
        return self.text


class Opening(Code):
    """Some functions of a file, and below them the whole file, folded until someone opens it."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(functions(path.read_text(), names))
        self.path = path

    def _repr_html_(self) -> str:
        whole = source(self.path)
        summary = f"the whole of {escape(self.path.name)}, {len(whole.text.splitlines())} lines"
        return f"{super()._repr_html_()}<details><summary>{summary}</summary>{whole._repr_html_()}</details>"


def functions(text: str, names: Sequence[str]) -> str:
    """The source of these functions or classes in a file's text, in the order of the names."""
    parts = Source(text).parts
    return "\n\n\n".join(parts[name] for name in names)


def source(thing: object, first: Sequence[str] = ()) -> Code:
    """The source of a helper, as it stands in its module now, or of a whole file, by its path.

    first: functions of a file to show, with the whole file folded below them.
    """
    if first:
        return Opening(thing, first)
    if isinstance(thing, Path):
        language = {".py": "python", ".toml": "toml"}.get(thing.suffix, "bash")
        return Code("\n".join(map(tidy, thing.read_text().splitlines())), language)
    return Code(inspect.getsource(thing))


def hunks(old: Path, new: Path, names: Sequence[str] = (), context: int = 1) -> list[str]:
    """Make the diff of two scripts, or only of these functions in both, hunk by hunk, without saying where."""
    texts = [script.read_text() for script in (old, new)]
    before, after = ((functions(text, names) if names else text).splitlines() for text in texts)
    lines = list(difflib.unified_diff(before, after, n=context, lineterm=""))[2:]
    starts = [i for i, line in enumerate(lines) if line.startswith("@@")] + [len(lines)]
    return ["\n".join(lines[a + 1 : b]) for a, b in pairwise(starts)]


def diff(hunk: str) -> Code:
    """A hunk: lines with - go, lines with + come."""
    return Code(hunk, "diff")
