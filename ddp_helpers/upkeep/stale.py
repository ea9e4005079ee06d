"""Say what has changed since a notebook was executed: its cells, and each file of the course that it opened.

`course.execute` has the kernel and all processes that it starts note what they read, and `tests/test_notebooks.py` asks
for what has changed. Comments, docstrings and layout of Python code count nowhere.
"""

import ast
import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ddp_helpers import ROOT

HOOK = Path(__file__).parent / "hook"
CELLS = "cells"  # the name of a notebook's own code in what it was made from
RECORDS = ("notebooks", "results")  # recorded runs: of a folder there that was read, all that it holds counts
MADE = ("build", "runs", "data")  # folders of what is made, where nothing is a source; nor is it in hidden ones
# Tables of rank/launchers.py to which anybody may add a row: they count where cells, or the lesson, name them.
TABLES = {"LAUNCHERS", "STARTS"}

MAGIC = re.compile(r"^([ \t]*(?:\w+ *= *)?)([%!].*)$", re.M)  # a line that IPython reads, and Python does not
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def noting(notes: Path) -> dict[str, str]:
    """Make the environment in which every Python process notes in a file what it opens beneath ROOT."""
    notes.touch()
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "DDP_OPENED_BELOW": str(ROOT), "DDP_OPENED_NOTES": str(notes)}


def sources(notes: Path) -> list[str]:
    """Read the notes: the paths, relative to ROOT, of the files that are sources of the course."""
    paths = set()
    for line in notes.read_text().splitlines():
        path = Path(source_from_cache(line) if line.endswith(".pyc") else line).relative_to(ROOT)
        if not path.parts:
            continue
        hidden = any(part.startswith(".") or part.endswith(".egg-info") for part in path.parts)
        record = Path(*path.parts[:3])
        if path.parts[:2] == RECORDS and len(path.parts) > 2 and (ROOT / record).is_dir():
            paths.add(record.as_posix())
        elif (ROOT / path).is_file() and not hidden and path.parts[0] not in MADE:
            paths.add(path.as_posix())
    return sorted(paths)


def made_from(notebook: NotebookNode, paths: Iterable[str]) -> dict[str, str]:
    """Hash what outputs are made from, by name: the notebook's code, and each file, b"" for one that is gone."""
    own, tables = cells(notebook), names_tables(notebook, paths)
    contents = {CELLS: own} | {path: content(path, tables) for path in paths}
    return {name: hashlib.sha256(text).hexdigest()[:16] for name, text in contents.items()}


def changed(notebook: NotebookNode) -> list[str]:
    """List what is no longer as it was when the notebook was executed; all of it is new to one that never was."""
    before = notebook.metadata.get("made_from", {CELLS: ""})
    now = made_from(notebook, sorted(before.keys() - {CELLS}))
    return [name for name in now if now[name] != before.get(name)]


def names_tables(notebook: NotebookNode, paths: Iterable[str]) -> bool:
    """Whether the cells, or the modules of a lesson, name a table that may grow: then outputs may show it."""
    lessons = [ROOT / path for path in paths if path.startswith("ddp_helpers/lessons/")]
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    texts += [path.read_text() for path in lessons if path.suffix == ".py" and path.is_file()]
    return any(re.search(rf"\b{table}\b", text) for table in TABLES for text in texts)


def content(path: str, tables: bool) -> bytes:
    """Read what of a file counts."""
    file = ROOT / path
    if file.is_dir():
        files = [each for each in sorted(file.rglob("*")) if each.is_file()]
        return b"\0".join(each.relative_to(file).as_posix().encode() + b"\0" + each.read_bytes() for each in files)
    if not file.is_file():
        return b""
    if path.endswith(".py"):
        return code(file.read_text(), tables)
    return cells(nbformat.read(file, as_version=4)) if path.endswith(".ipynb") else file.read_bytes()


def cells(notebook: NotebookNode) -> bytes:
    """Join what counts of a notebook's code cells."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    parts = [code(f"pass\n{text}", True) for text in texts]  # behind `pass` a string is no docstring: a cell shows it
    silent = [text.rstrip().endswith(";") for text in texts]  # this hides what a cell would show
    return b"\0".join([*parts, bytes(silent)])


@cache
def code(text: str, tables: bool) -> bytes:
    """Reduce code to its syntax tree without docstrings, and tables if they do not count; or to one string."""
    for python in (text, MAGIC.sub(lambda line: f"{line[1]}{line[2].split()}", text), repr([text])):
        with suppress(SyntaxError, ValueError):
            tree = ast.parse(python)
            break
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    if not tables:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.Assign) and assigned(node) & TABLES)]
    return repr(shape(tree)).encode()


def assigned(node: ast.Assign) -> set[str]:
    """The names that an assignment gives a value."""
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def shape(node: object) -> object:
    """Turn a syntax tree into lists, the same in every Python; ast.unparse and ast.dump change from one to the next."""
    if isinstance(node, ast.AST):
        fields = [(name, shape(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return [type(node).__name__, *fields]
    return [shape(each) for each in node] if isinstance(node, list) else node
