"""The pages of docs/, the tables in them, and the text of the notebooks."""

import re
from functools import cache

import nbformat

from ddp_helpers import ROOT
from ddp_helpers.upkeep.front_page import NOTEBOOKS

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
README, SEEDS, GLOSSARY, TROUBLE, TRAINERS, SCRIPTS = (
    path.read_text()
    for path in (
        ROOT / "README.md",
        *(DOCS / f"{name}.md" for name in ("seeds", "glossary", "troubleshooting", "trainers", "scripts")),
    )
)


def rows(text: str, *header: str) -> list[list[str]]:
    """The rows of every table with this header, a list of cells each."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == list(header):
            inside = True
        elif not cells:
            inside = False
        elif inside and set("".join(cells)) - set("- "):
            rows.append(cells)
    return rows


@cache
def prose(number: str) -> str:
    """The markdown cells of a notebook."""
    cells = nbformat.read(NOTEBOOKS[number], as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@cache
def contents(number: str) -> str:
    """The cells of a notebook, those with code between fences; outputs are left out."""
    cells = nbformat.read(NOTEBOOKS[number], as_version=4).cells
    return "\n".join(cell.source if cell.cell_type == "markdown" else f"```\n{cell.source}\n```" for cell in cells)
