"""The reading edition: README, docs/ and the notebooks with the outputs they have.

Sphinx reads it as its settings and calls `setup`; `make site` builds the pages. The source
folder is the repository, so that every link leads to the same place here, on a code host and in
JupyterLab.
"""

import json
import re
from itertools import chain
from pathlib import Path

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers.shell import BashLexer
from pygments.token import Keyword, Operator, String
from sphinx.application import Sphinx

_ROOT = Path(__file__).parents[1]

project = "From one GPU to many"
html_title = project
language = "en"
root_doc = "README"
_FIRST = "notebooks/01_train_on_one_gpu"

# The contents: first what a reader in need or a trainer looks for, then the course. A page that no
# line names is not built, which a test finds; a notebook of your own has no place.
_CONTENTS = {
    "Your script": ["docs/your-script.md", "docs/scripts-and-jobs.md"],
    "Fix a run": ["docs/troubleshooting.md", "docs/messages.md", "docs/tools.md"],
    "Teach": ["docs/instructors.md", "docs/participants.md"],
    "Learn: the core": ["notebooks/0[0-9]*.ipynb"],
    "Learn: electives": ["notebooks/1[0-9]*.ipynb"],
    "Look up": [
        "docs/glossary.md",
        "docs/platforms.md",
        "docs/gpus.md",
        "docs/published-mistakes.md",
    ],
    "Solutions": ["notebooks/solutions/*.ipynb"],
    "Behind the course": [
        "slurm/job.ipynb",
        "notebooks/results/*.md",
        "docs/structure.md",
        "AGENTS.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ],
}
include_patterns = ["README.md", *chain.from_iterable(_CONTENTS.values())]
exclude_patterns = [
    ".*",
    "**/.*",
    "build",
    "data",
    "runs",
    "tests",
    "ddp_helpers",
    "ddp_tools",
    "*.egg-info",
]

extensions = ["myst_nb"]
nb_execution_mode = "off"  # what is shown is what is committed
nb_merge_streams = True
nb_code_prompt_show = "Show the set-up"  # the one kind of cell that is folded
nb_code_prompt_hide = "Hide the set-up"
myst_heading_anchors = 3
highlight_language = "text"

html_theme = "furo"
pygments_dark_style = "github-dark"  # the theme's own underlines every name of a module
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["course.css"]
html_js_files = ["course.js"]
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}  # README is the first page, index.html leads there
html_copy_source = False
html_show_copyright = False


class _CellLexer(IPython3Lexer):
    """The lexer of a code cell.

    IPython's lexer leaves all below a cell magic plain; those of the course take Python, or bash.
    """

    shell = (
        r"(?s)\A(%%)(slurm|bash|writefile [\w./]+\.(?:sbatch|sh))(.*?\n)(.*)",
        bygroups(Operator, Keyword, String, using(BashLexer)),
    )
    magic = (
        r"\A(%%)(ranks|launch|clinic|writefile)(.*\n)",
        bygroups(Operator, Keyword, String),
    )
    tokens = {  # noqa: RUF012
        **IPython3Lexer.tokens,
        "root": [shell, magic, *IPython3Lexer.tokens["root"]],
    }


def _contents_line(path: Path) -> str:
    """Write a file's line of the contents: its title, with a notebook's number."""
    document = path.relative_to(_ROOT).with_suffix("").as_posix()
    notebook = path.suffix == ".ipynb"
    text = "".join(_read_cells(path)[0]["source"]) if notebook else path.read_text(encoding="utf-8")
    title = re.search(r"^# (.+)", text, re.MULTILINE)
    if notebook:
        number = re.match(r"\d+[a-z]?(?=_)", path.name)
        return f"{number[0]} {title[1]} <{document}>" if number and title else document
    return f"{re.split('[:,]', title[1])[0]} <{document}>" if title else document


def _read_cells(path: Path) -> list[dict]:
    """Read the cells of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def _contents() -> str:
    """Write the tables of contents, in MyST's Markdown."""
    tables = []
    for caption, patterns in _CONTENTS.items():
        paths = chain.from_iterable(sorted(_ROOT.glob(pattern)) for pattern in patterns)
        if lines := [_contents_line(path) for path in paths]:
            options = [":hidden:", f":caption: {caption}"]
            tables.append("\n".join(["```{toctree}", *options, *lines, "```"]))
    return "\n\n".join(tables)


def _prepare_source(app: Sphinx, document: str, source: list[str]) -> None:
    """Turn anchors into targets that MyST knows, and add the contents to README.

    A code host would show the contents as text. Sphinx calls it with each source, and takes the
    list's only member back.
    """
    source[0] = re.sub(r'<a id=\\?"([\w-]+)\\?"></a>(?=\\?n|\n|")', r"(\1)=", source[0])
    if document == root_doc:
        source[0] += f"\n\n{_contents()}\n"


def _lead_in(app: Sphinx, document: str, _template: str, context: dict, _tree: object) -> None:
    """Let *next* on README be the first notebook, and *previous* there be README.

    In the contents, the pages for a reader in need stand between the two.
    """
    ways = {root_doc: ("next", _FIRST), _FIRST: ("prev", root_doc)}
    if document in ways:
        side, other = ways[document]
        link = app.builder.get_relative_uri(document, other)
        context[side] = {"link": link, "title": app.env.titles[other].astext()}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the lexer, the step before reading and that before writing; Sphinx calls it once."""
    app.add_lexer("ipython3", _CellLexer)
    app.connect("source-read", _prepare_source)
    app.connect("html-page-context", _lead_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
