"""Show source where it is talked about: helpers, scripts, and the difference between two scripts."""

import difflib
import inspect
from itertools import pairwise
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from ddp_helpers.notebook import scripts
from ddp_helpers.notebook.screen import tidy

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


def source(thing: object) -> Code:
    """The source of a helper, as it stands in its module now, or of a whole file, by its path."""
    if isinstance(thing, Path):
        language = {".py": "python", ".toml": "toml"}.get(thing.suffix, "bash")
        return Code("\n".join(map(tidy, thing.read_text().splitlines())), language)
    return Code(inspect.getsource(thing))


def hunks(old: str | Path, new: str | Path, context: int = 1) -> list[str]:
    """Show the diff between two scripts, the course's by name or any by path, hunk by hunk, without saying where."""
    texts = [
        (one.read_text() if isinstance(one, Path) else scripts.Script(one).text()).splitlines() for one in (old, new)
    ]
    lines = list(difflib.unified_diff(*texts, n=context, lineterm=""))[2:]
    starts = [i for i, line in enumerate(lines) if line.startswith("@@")] + [len(lines)]
    return ["\n".join(lines[a + 1 : b]) for a, b in pairwise(starts)]


def diff(hunk: str) -> Code:
    """A hunk: lines with - go, lines with + come."""
    return Code(hunk, "diff")
