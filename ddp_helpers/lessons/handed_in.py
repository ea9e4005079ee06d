"""Read notebooks that people have handed in: of which notebook one is a copy, what runs of it.

What runs for an exercise is the cell that defines its function (of several the last one that is no
stub), whole, and before it what that needs of the cells above: going upwards, each statement at the
top of a cell that binds a name which is used further down, or that mentions a variable which is.
So imports, helpers and parameters run, and trainings and drawings do not. What the bottom of a
notebook defines for a cell above it is missing, as where a kernel runs it from the top. An exercise
of `%%ranks` cells takes what stands in such cells, and each rank runs all of it.

`grade` calls it. Nothing of a notebook is run here.
"""

import ast
import json
import re
from contextlib import suppress
from pathlib import Path
from symtable import SymbolTable, symtable

_CHECK = re.compile(r"^lessons\.check\((\w+)\)", re.M)
_ON_RANKS = re.compile(r"%%ranks +(\d+).*\n")
_HERE = re.compile(r"%%(time|capture)\b.*\n")  # magic whose cells are the notebook's own
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


def number_of(notebook: str) -> re.Pattern[str]:
    """Return what finds this notebook's number in the name of a copy, and a person before it."""
    return re.compile(rf"(?:(.*?)[ ._-]+)?{notebook.partition('_')[0]}(?![0-9a-z])")


def recognise(stem: str, text: str, originals: dict[str, dict[str, int]]) -> str:
    """Name the notebook that this is a copy of: by what its cells define and check, or by `stem`.

    Raises ValueError where it may be none, or several.
    """
    found = {
        one: sum(_defines(name, text) + (f"check({name})" in text) for name in originals[one])
        for one in originals
    }
    best = [one for one in originals if found[one] == max(found.values())]
    if len(best) > 1:
        best = [one for one in best if number_of(one).match(stem)]
    if len(best) != 1:
        raise ValueError("it cannot be told of which notebook of the course this is a copy")
    return best[0]


def _defines(name: str, text: str) -> bool:
    return re.search(rf"^(def|class) {name}\b|^{name} *=", text, re.M) is not None


def program(cells: list[str], name: str, on_ranks: bool) -> str:
    """Return what runs for an exercise, "" where no cell defines it.

    on_ranks: of `%%ranks` cells, and else of cells without such a line.
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
    return "\n".join([*_FUTURE.findall(text), _FUTURE.sub("", text)])  # of a file they are first


def _without_magic(cell: str) -> str:
    """Return a cell without lines that only IPython understands, if there are such."""
    with suppress(SyntaxError, ValueError):
        ast.parse(cell)
        return cell
    return re.sub(r"^[ \t]*[%!].*$", "", cell, flags=re.M)


def _needed(above: list[str], cell: str) -> list[str]:
    """List the statements of the cells above that a cell needs, in their order."""
    statements: list[ast.stmt] = []
    tables: list[SymbolTable] = []
    end = 0
    for text in [*above, cell]:
        end = len(statements)
        with suppress(SyntaxError, ValueError):  # such a cell defines nothing, and fails if it runs
            body = ast.parse(text).body
            tables += [symtable(ast.unparse(each), "cell", "exec") for each in body]
            statements += body
    firm = [isinstance(each, _FIRM) for each in statements]
    bound = [_bound(table) for table in tables]
    variables = {name for one, names in zip(firm, bound, strict=True) if not one for name in names}
    wanted: set[str] = set()
    kept = []
    for place in reversed(range(len(statements))):
        source, used = ast.unparse(statements[place]), _used(tables[place]) - {"lessons"}
        mentions = set() if firm[place] else used & variables
        if place < end:
            if not (bound[place] | mentions) & wanted and not source.endswith(" import *"):
                continue
            kept.append(source)
        if firm[place] or isinstance(statements[place], ast.Assign):  # it binds in any case
            wanted -= bound[place]
        wanted |= used
    return kept[::-1]


def _bound(table: SymbolTable) -> set[str]:
    found = (each for each in table.get_symbols() if each.is_assigned() or each.is_imported())
    return {each.get_name() for each in found}


def _used(table: SymbolTable) -> set[str]:
    """Return the names that a statement reads from outside, also when its functions are called."""
    inside = [name for child in table.get_children() for name in _used(child)]
    is_top = table.get_type() == "module"
    found = (each for each in table.get_symbols() if is_top or each.is_global())
    return {each.get_name() for each in found if each.is_referenced()}.union(inside)
