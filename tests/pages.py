"""The pages of docs/, the tables in them, the text of the notebooks, and the texts of the source."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from itertools import product

import nbformat

from ddp_helpers import ROOT
from ddp_helpers.upkeep.front_page import NOTEBOOKS

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
README, SEEDS, GLOSSARY, TROUBLE, TRAINERS = (
    path.read_text()
    for path in (
        ROOT / "README.md",
        *(DOCS / f"{name}.md" for name in ("published-mistakes", "glossary", "troubleshooting", "instructors")),
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


# ---- texts of the source

HOLE = "\0"
Names = dict[str, list[ast.expr]]


def ways(part: ast.expr, names: Names, depth: int = 3) -> list[str]:
    """What a part of a text can be: itself, either branch of `a if … else b`, what a name stands for, or a hole."""
    if isinstance(part, ast.Constant):
        return [part.value] if isinstance(part.value, str) else [HOLE]
    if isinstance(part, ast.JoinedStr):
        return ["".join(parts) for parts in product(*(ways(value, names, depth) for value in part.values))]
    if isinstance(part, ast.FormattedValue) and part.conversion == -1:
        return ways(part.value, names, depth)
    if isinstance(part, ast.IfExp):
        return [*ways(part.body, names, depth), *ways(part.orelse, names, depth)]
    if isinstance(part, ast.Name) and part.id in names and depth:
        return [text for value in names[part.id] for text in ways(value, names, depth - 1)]
    return [HOLE]


def assigned(nodes: Iterable[ast.AST]) -> Names:
    """The texts that names stand for."""
    names: Names = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr | ast.IfExp):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).append(node.value)
    return names
