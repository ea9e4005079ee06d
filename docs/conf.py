"""The reading edition, for Sphinx: README, docs/ and the notebooks with the outputs they have. `make site` builds it.

The source folder is the repository, so that every link leads to the same place here, on a code host and in JupyterLab.
"""

import json
import re
from pathlib import Path

from docutils import nodes
from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers.shell import BashLexer
from pygments.token import Keyword, Operator, String
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "From one GPU to many"
html_title = project
language = "en"
root_doc = "README"

# The contents, in reading order; a notebook of your own beside the course has no place.
CONTENTS = {
    "The course": ["notebooks/[0-9]*.ipynb"],
    "Reference": ["docs/*.md"],
    "Solutions": ["notebooks/solutions/*.ipynb"],
    "Behind the course": ["slurm/job.ipynb", "notebooks/results/*.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
include_patterns = ["README.md", *(pattern for patterns in CONTENTS.values() for pattern in patterns)]
exclude_patterns = [".*", "**/.*", "build", "data", "runs", "tests", "ddp_helpers", "*.egg-info"]

extensions = ["myst_nb"]
nb_execution_mode = "off"  # what is shown is what is committed
nb_merge_streams = True
myst_heading_anchors = 3
highlight_language = "text"

html_theme = "furo"
pygments_dark_style = "github-dark"  # the theme's own underlines every name of a module
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["course.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}  # README is the first page, index.html leads there
html_copy_source = False
html_show_copyright = False


class Cell(IPython3Lexer):
    """A code cell. IPython's lexer leaves all below a cell magic plain; those of the course take Python, or bash."""

    shell = (
        r"(?s)\A(%%)(slurm|bash|writefile [\w.]+\.sbatch)(.*?\n)(.*)",
        bygroups(Operator, Keyword, String, using(BashLexer)),
    )
    magic = (r"\A(%%)(ranks|launch|clinic|writefile)(.*\n)", bygroups(Operator, Keyword, String))
    tokens = {**IPython3Lexer.tokens, "root": [shell, magic, *IPython3Lexer.tokens["root"]]}  # noqa: RUF012


def entry(path: Path) -> str:
    """A line of the contents: a notebook of the course is called by its number and its title."""
    document = path.relative_to(ROOT).with_suffix("").as_posix()
    number = re.match(r"\d+(?=_)", path.name)
    if path.suffix != ".ipynb" or not number:
        return document
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    title = re.search(r"^# (.+)", first, re.MULTILINE)
    return f"{number[0]} {title[1]} <{document}>" if title else document


def contents() -> str:
    """The tables of contents, in MyST's words."""
    parts = []
    for caption, patterns in CONTENTS.items():
        lines = [entry(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        if lines:
            parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", *lines, "```"]))
    return "\n\n".join(parts)


def prepare(app: Sphinx, document: str, source: list[str]) -> None:
    """Turn anchors into targets that MyST knows. Add the contents to README: a code host would show them as text."""
    source[0] = re.sub(r'<a id=\\?"([\w-]+)\\?"></a>(?=\\?n|\n|")', r"(\1)=", source[0])
    if document == root_doc:
        source[0] += f"\n\n{contents()}\n"


def describe_figures(app: Sphinx, doctree: nodes.document) -> None:
    """Give each figure the alt text and the width that the notebook keeps with it; MyST-NB leaves both behind."""
    path = Path(doctree["source"])
    if path.suffix != ".ipynb":
        return
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    about = [output["metadata"].get("image/png", {}) for output in outputs if "image/png" in output.get("data", {})]
    images = [node for node in doctree.findall(nodes.image) if node.parent.get("mime_type") == "image/png"]
    for image, kept in zip(images, about, strict=True):
        image["alt"] = kept.get("alt", "")
        if "width" in kept:
            image["width"] = f"{kept['width']}px"


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this once."""
    app.add_lexer("ipython3", Cell)
    app.connect("source-read", prepare)
    app.connect("doctree-read", describe_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
