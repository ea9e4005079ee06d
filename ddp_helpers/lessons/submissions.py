"""Read submitted notebooks: which notebook each is a copy of, and which of its code to run.

For an exercise the entire cell that defines its function runs (of several, the last one that is not
a stub), and before it the statements of the cells above that it needs: going upwards, each
top-level statement that binds a name which is used further down, or that mentions such a variable.
So imports, helpers and parameters run, and training and drawing do not. A name that only a later
cell defines is missing, as it is if a kernel runs the notebook from the top. An exercise in
`%%ranks` cells takes the code of such cells, and each rank runs all of it.

`grade` calls it. No code of a notebook is run here.
"""

import ast
import json
import re
from contextlib import suppress
from pathlib import Path
from symtable import SymbolTable, symtable

_CHECK = re.compile(r"^lessons\.check\((\w+)\)", re.M)
_ON_RANKS = re.compile(r"%%ranks +(\d+).*\n")
_HERE = re.compile(r"%%(time|capture)\b.*\n")  # magics whose cells run in the notebook's kernel
_FUTURE = re.compile(r"^from __future__ import .*$", re.M)
_FIRM = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def code_cells(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def exercises_in(path: Path) -> dict[str, int]:
    """Map the exercises of a notebook to the ranks of their `%%ranks` cells, or to 0."""
    cells = [(cell, _ON_RANKS.match(cell)) for cell in code_cells(path)]
    return {name: int(on[1]) if on else 0 for cell, on in cells for name in _CHECK.findall(cell)}


def recognise(text: str, originals: dict[str, dict[str, int]]) -> str:
    """Name the notebook that this is a copy of, by what its cells define and check.

    Raises ValueError if it is a copy of none.
    """
    found = {
        one: sum(_defines(name, text) + (f"check({name})" in text) for name in originals[one])
        for one in originals
    }
    best = max(found, key=lambda one: found[one])
    if not found[best]:
        raise ValueError("it defines no function that an exercise of the course asks for")
    return best


def _defines(name: str, text: str) -> bool:
    return re.search(rf"^(def|class) {name}\b|^{name} *=", text, re.M) is not None


def program(cells: list[str], name: str, on_ranks: bool) -> str:
    """Return the code to run for an exercise, "" if no cell defines it.

    on_ranks: take it from `%%ranks` cells, otherwise from cells without such a line.
    """
    magic = _ON_RANKS if on_ranks else _HERE
    own = [cell for cell in cells if magic.match(cell) or not (on_ranks or cell.startswith("%%"))]
    cells = [_without_magic(magic.sub("", cell, count=1)) for cell in own]
    places = [place for place, cell in enumerate(cells) if _defines(name, cell)]
    if not places:
        return ""
    done = [place for place in places if "NotImplementedError" not in cells[place]]
    last = (done or places)[-1]
    text = "\n".join([*_needed(cells[:last], cells[last]), cells[last]])
    return "\n".join([*_FUTURE.findall(text), _FUTURE.sub("", text)])  # they must come first


def _without_magic(cell: str) -> str:
    """Return a cell without the lines that only IPython understands."""
    with suppress(SyntaxError, ValueError):
        ast.parse(cell)
        return cell
    return re.sub(r"^[ \t]*[%!].*$", "", cell, flags=re.M)


def _needed(above: list[str], cell: str) -> list[str]:
    """List the statements of the cells above that a cell needs, in their order."""
    nodes: list[ast.stmt] = []
    for text in above:
        with suppress(SyntaxError, ValueError):  # such a cell defines nothing
            nodes += ast.parse(text).body
    sources = [ast.unparse(node) for node in nodes]
    firm = [isinstance(node, _FIRM) for node in nodes]
    names = [_names(source) for source in sources]
    variables = set().union(
        *(bound for one, (bound, _) in zip(firm, names, strict=True) if not one)
    )
    wanted: set[str] = set()
    with suppress(SyntaxError, ValueError):  # it fails when it runs
        bound, used = _names(cell)
        wanted = used - bound
    kept = []
    for place in reversed(range(len(nodes))):
        bound, used = names[place]
        mentions = set() if firm[place] else used & variables
        if (bound | mentions) & wanted or sources[place].endswith(" import *"):
            kept.append(sources[place])
            if firm[place] or isinstance(nodes[place], ast.Assign):  # it binds in any case
                wanted -= bound
            wanted |= used
    return kept[::-1]


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the names that statements bind, and those that they use, even in their functions."""
    table = symtable(source, "cell", "exec")
    bound = {
        each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()
    }
    return bound, _used(table)


def _used(table: SymbolTable) -> set[str]:
    """Return the names that a scope and its inner scopes read from outside."""
    inside = [name for child in table.get_children() for name in _used(child)]
    is_top = table.get_type() == "module"
    found = (each for each in table.get_symbols() if is_top or each.is_global())
    return {each.get_name() for each in found if each.is_referenced()}.union(inside)
