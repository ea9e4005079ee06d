"""Say what has changed since a notebook was executed: its cells, and each file that it opened.

`course.execute` has the kernel and all processes that it starts note what they read, and
`tests/test_notebooks.py` asks for what has changed. Comments, docstrings and layout of Python code
count nowhere.
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

_HOOK = Path(__file__).parent / "hook"
CELLS = "cells"  # the name of a notebook's own code in what it was made from
# Recorded runs: of a folder there that was read, all that it holds counts.
_RECORDS = ("notebooks", "results")
# Messages, to which anybody may add a row: what a notebook shows of them is asserted there.
_RULES = ("ddp_helpers", "tools", "explain", "rules.toml")
# Folders of what is made, where nothing is a source; nor is it in hidden ones.
_MADE = ("build", "runs", "data")
# A table to which anybody may add a row: it counts where cells, or the lesson, name it.
_TABLES = {"LAUNCHERS"}

_MAGIC = re.compile(r"^([ \t]*(?:\w+ *= *)?)([%!].*)$", re.M)  # a line that IPython alone reads
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def noting(notes: Path) -> dict[str, str]:
    """Make the environment in which every Python process notes what it opens beneath ROOT.

    notes: the file for that.
    """
    notes.touch()
    folders = (str(_HOOK), os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "DDP_OPENED_BELOW": str(ROOT),
        "DDP_OPENED_NOTES": str(notes),
    }


def sources(notes: Path) -> list[str]:
    """Read the notes: the paths, relative to ROOT, of the files that are sources of the course."""
    paths = set()
    for line in notes.read_text().splitlines():
        file = Path(source_from_cache(line) if line.endswith(".pyc") else line)
        path = file.relative_to(ROOT)
        record = Path(*path.parts[:3])
        if path.parts[:2] == _RECORDS and len(path.parts) > 2 and (ROOT / record).is_dir():
            paths.add(record.as_posix())
        elif (ROOT / path).is_file() and _is_source(path):
            paths.add(path.as_posix())
    return sorted(paths)


def _is_source(path: Path) -> bool:
    """Whether a file, by its path relative to ROOT, is written by people."""
    for part in path.parts:
        if part.startswith(".") or part.endswith(".egg-info"):
            return False
    return path.parts[0] not in _MADE and path.parts != _RULES


def made_from(notebook: NotebookNode, paths: Iterable[str]) -> dict[str, str]:
    """Return digests of what outputs are made from, by name: the notebook's code, and each file.

    A file that is gone has the digest of b"".
    """
    paths = list(paths)
    with_tables = _names_tables(notebook, paths)
    contents = {CELLS: _cells(notebook)}
    for path in paths:
        contents[path] = _content(path, with_tables)
    return {name: hashlib.sha256(text).hexdigest()[:16] for name, text in contents.items()}


def changed(notebook: NotebookNode) -> list[str]:
    """List what is no longer as it was when the notebook was executed.

    All of it is new to a notebook that never was.
    """
    before = notebook.metadata.get("made_from", {CELLS: ""})
    now = made_from(notebook, sorted(before.keys() - {CELLS}))
    return [name for name in now if now[name] != before.get(name)]


def _names_tables(notebook: NotebookNode, paths: Iterable[str]) -> bool:
    """Whether the cells, or the modules of a lesson, name a table that may grow.

    Then outputs may show it.
    """
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for path in paths:
        file = ROOT / path
        if path.startswith("ddp_helpers/lessons/") and file.suffix == ".py" and file.is_file():
            texts.append(file.read_text())
    return any(re.search(rf"\b{table}\b", text) for table in _TABLES for text in texts)


def _content(path: str, with_tables: bool) -> bytes:
    """Read of a file, or of all files of a folder, what counts; b"" if there is none."""
    file = ROOT / path
    if file.is_dir():
        parts = []
        for part in sorted(file.rglob("*")):
            if part.is_file():
                parts.append(part.relative_to(file).as_posix().encode())
                parts.append(part.read_bytes())
        return b"\0".join(parts)
    if not file.is_file():
        return b""
    if path.endswith(".py"):
        return _code(file.read_text(), with_tables)
    if path.endswith(".ipynb"):
        return _cells(nbformat.read(file, as_version=4))
    return file.read_bytes()


def _cells(notebook: NotebookNode) -> bytes:
    """Join what counts of a notebook's code cells: their code, and whether each shows its value."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    # Behind `pass` a string is no docstring: a cell shows it.
    parts = [_code(f"pass\n{text}", with_tables=True) for text in texts]
    is_silent = [text.rstrip().endswith(";") for text in texts]
    return b"\0".join([*parts, bytes(is_silent)])


@cache
def _code(text: str, with_tables: bool) -> bytes:
    """Reduce code to its syntax tree without docstrings, and without tables if they do not count.

    What Python cannot read even without magics is reduced to one string.
    """
    tree = _syntax_tree(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    if not with_tables:
        tree.body = [node for node in tree.body if not _is_table(node)]
    return repr(_as_lists(tree)).encode()


def _syntax_tree(text: str) -> ast.Module:
    """Read code, also with IPython's magics, of which each becomes a list of words."""
    without_magics = _MAGIC.sub(lambda line: f"{line[1]}{line[2].split()}", text)
    for python in (text, without_magics):
        with suppress(SyntaxError, ValueError):
            return ast.parse(python)
    return ast.parse(repr([text]))


def _is_table(node: ast.stmt) -> bool:
    """Whether a statement gives a value to a table that may grow."""
    if not isinstance(node, ast.Assign):
        return False
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    return bool(names & _TABLES)


def _as_lists(node: object) -> object:
    """Turn a syntax tree into lists, the same in every Python.

    ast.unparse and ast.dump change from one version to the next.
    """
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if value is not None and value != []:
                fields.append((name, _as_lists(value)))
        return [type(node).__name__, *fields]
    return [_as_lists(part) for part in node] if isinstance(node, list) else node
