"""Show source code in notebooks: helpers, scripts, and the differences between two scripts.

It needs the files that it shows.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from ddp_helpers.launch.screen import shorten_paths
from ddp_helpers.rank.scripts import places

# Colours are in the text itself, since a code host and a static page lack our style sheet.
# Dark on light in any theme.
_STYLE = "background:#f6f6f6;color:#222;padding:0.5em;line-height:1.35;"
_STYLE += "overflow-x:auto;white-space:pre;font-family:monospace"


class Code:
    """A block of code that shows itself highlighted, or as plain text if that is impossible."""

    def __init__(self, text: str, language: str = "python") -> None:
        self.text, self.language = text.rstrip(), language

    def _repr_html_(self) -> str:
        formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=_STYLE)
        return highlight(self.text, get_lexer_by_name(self.language), formatter)

    def __repr__(self) -> str:
        return self.text


class _Opening(Code):
    """Some functions of a file, and below them the entire file, folded."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(functions(path.read_text(), names))
        self.path = path

    def _repr_html_(self) -> str:
        file = source(self.path)
        count = len(file.text.splitlines())
        summary = f"<summary>all of {escape(self.path.name)}, {count} lines</summary>"
        return f"{super()._repr_html_()}<details>{summary}{file._repr_html_()}</details>"


def functions(text: str, names: Sequence[str]) -> str:
    """Return the source of these functions or classes in a file's text, in the order of names."""
    lines, found = text.splitlines(), places(text)
    return "\n\n\n".join("\n".join(lines[slice(*found[name])]) for name in names)


def source(thing: Path | Callable | type, first: Sequence[str] = ()) -> Code:
    """Return the current source of a helper, or of a file, given by its path.

    first: functions of a file to show, with the entire file folded below them.
    """
    if not isinstance(thing, Path):
        return Code(inspect.getsource(thing))
    if first:
        return _Opening(thing, first)
    languages = {".py": "python", ".toml": "toml"}
    lines = [shorten_paths(line) for line in thing.read_text().splitlines()]
    return Code("\n".join(lines), languages.get(thing.suffix, "bash"))


def hunks(old: Path, new: Path, names: Sequence[str] = (), context: int = 1) -> list[str]:
    """Return the diff of two scripts, or only of these functions in both, hunk by hunk.

    Line numbers are left out. context: lines around each change.
    """
    texts = [path.read_text() for path in (old, new)]
    before, after = ((functions(text, names) if names else text).splitlines() for text in texts)
    changes = difflib.unified_diff(before, after, n=context, lineterm="")
    return re.split(r"\n?^@@.*\n", "\n".join(changes), flags=re.M)[1:]


def diff(hunk: str) -> Code:
    """Show a hunk of a diff: lines with - are removed, lines with + are added."""
    return Code(hunk, "diff")
