"""Show source where it is talked about: helpers, scripts, and the difference between two scripts."""

import difflib
import inspect
from itertools import pairwise
from pathlib import Path

from IPython.display import Markdown

from ddp_helpers.notebook import scripts


def code(text: str, language: str = "python") -> Markdown:
    """Text as a highlighted block."""
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def source(thing: object) -> Markdown:
    """The source of a helper, as it stands in its module now, or of a whole script, by its path."""
    return code(thing.read_text() if isinstance(thing, Path) else inspect.getsource(thing))


def hunks(old: str, new: str, context: int = 1) -> list[str]:
    """What changes from one script of the course to another, hunk by hunk; without the lines that say where."""
    texts = [scripts.Script(name).text().splitlines() for name in (old, new)]
    lines = list(difflib.unified_diff(*texts, n=context, lineterm=""))[2:]
    starts = [i for i, line in enumerate(lines) if line.startswith("@@")] + [len(lines)]
    return ["\n".join(lines[a + 1 : b]) for a, b in pairwise(starts)]


def diff(hunk: str) -> Markdown:
    """A hunk, with what goes in red and what comes in green."""
    return code(hunk, "diff")
