"""Say when a notebook's outputs are stale: a digest of its code, of the code that it imports, and of files it names.

Comments, docstrings and layout count nowhere. Nor do the checkers that `lessons` imports by a pattern: what is printed
of an exercise that nobody solved does not depend on them.
"""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ddp_helpers import ROOT

# What no import leads to counts where code names it: "job.ipynb", ROOT / "slurm" / "sites", scripts.write("doctor", …).
# The name is a file's (a module's or a site's also without its ending) or a folder's, of which all files count; but
# of slurm/sites, to which anybody may add a site, only the one where notebooks are executed. A file in slurm/scripts,
# which is written out from a module, is known as that module.
NAMED = ("ddp_helpers/rank/scripts/[a-z]*.py", "slurm/job.sbatch.jinja", "slurm/job.ipynb", "slurm/sites/[a-z]*.toml")
NAMED += ("notebooks/results/*", "notebooks/letters.py")
STARTED = ("train.py", "dial_nodes.py", "two_nodes.sh")  # what lessons start or copy, and do not import
NEVER = ("README.md", ".")  # how the names of files begin that never count

MAGIC = re.compile(r"^([ \t]*(?:\w+ *= *)?)([%!].*)$", re.M)  # a line that IPython reads, and Python does not
IN_TEXT = re.compile(r"\b(ddp_helpers(?:\.\w+)*)(?: import ([\w, ]+))?")  # a module, or an import, within a string
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest(notebook: NotebookNode) -> str:
    """Hash all that outputs are made from: code cells, the code that they import, also indirectly, and named files."""
    own, uses = cells(notebook)
    made_from = hashlib.sha256(own)
    for path, counts in sorted(closure(uses).items()):
        made_from.update(path.encode() + b"\0" + counts + b"\0")
    return made_from.hexdigest()


def closure(uses: Iterable[str]) -> dict[str, bytes]:
    """Follow imports and names through the repository: each file's path, and what of it counts."""
    places, found, todo = known(), {}, list(uses)
    while todo:
        name = todo.pop()
        parents = accumulate(name.split("."), "{}.{}".format) if name.startswith("ddp_helpers.") else ()
        for path in {path for one in (name, *parents) for path in places.get(one, ())} - found.keys():
            found[path], more = read(path)
            todo += more
    return found


def modules() -> dict[str, Path]:
    """The file of each module of the package, by its dotted name."""
    names = {
        path: path.relative_to(ROOT).with_suffix("").parts for path in sorted((ROOT / "ddp_helpers").rglob("*.py"))
    }
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}


def known() -> dict[str, set[str]]:
    """Map each name that code may use, of a module or in NAMED, to the paths of its files."""
    found = defaultdict(set, sites={"slurm/sites/local.toml"})
    for name, path in modules().items():
        found[name].add(path.relative_to(ROOT).as_posix())
    for path in (path for name in STARTED for path in ROOT.glob(f"ddp_helpers/lessons/*/{name}")):
        found[path.name].add(path.relative_to(ROOT).as_posix())
    for path in (path for pattern in NAMED for path in ROOT.glob(pattern)):
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file() and not file.name.startswith(NEVER):
                for name in {path.name, path.name.removesuffix(".py").removesuffix(".toml")}:
                    found[name].add(file.relative_to(ROOT).as_posix())
    return found


def read(path: str) -> tuple[bytes, frozenset[str]]:
    """Read what of a file counts, and the names that it uses."""
    content = (ROOT / path).read_bytes()
    if path.endswith(".py"):
        return code(content.decode(), tuple(path.split("/")[:-1]))
    return cells(nbformat.reads(content.decode(), as_version=4)) if path.endswith(".ipynb") else (content, frozenset())


def cells(notebook: NotebookNode) -> tuple[bytes, frozenset[str]]:
    """Join the code cells of a notebook: what of them counts, and the names that they use."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    parts = [code(f"pass\n{source}") for source in sources]  # behind `pass` a string is no docstring: a cell shows it
    silent = [source.rstrip().endswith(";") for source in sources]  # this hides what a cell would show
    return b"\0".join([*(own for own, _ in parts), bytes(silent)]), frozenset().union(*(uses for _, uses in parts))


@cache
def code(text: str, package: tuple[str, ...] = ()) -> tuple[bytes, frozenset[str]]:
    """Reduce code to its syntax tree without docstrings, and the names it uses; what is not Python is one string."""
    for python in (text, MAGIC.sub(lambda line: f"{line[1]}{line[2].split()}", text), repr([text, *text.split()])):
        with suppress(SyntaxError, ValueError):
            tree = ast.parse(python)
            break
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return repr(shape(tree)).encode(), frozenset(name for node in ast.walk(tree) for name in names(node, package))


def names(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """The dotted names that an import statement imports, or what a string names: modules, and parts of a path."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = package[: len(package) - node.level + 1] if node.level else ()
        module = ".".join(filter(None, (*home, node.module)))
        yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from node.value.split("/")
        for module, imported in IN_TEXT.findall(node.value):
            yield from (module, *(f"{module}.{name}" for name in imported.replace(",", " ").split()))


def shape(node: object) -> object:
    """Turn a syntax tree into lists, the same in every Python; ast.unparse and ast.dump change from one to the next."""
    if isinstance(node, ast.AST):
        fields = [(name, shape(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return [type(node).__name__, *fields]
    return [shape(each) for each in node] if isinstance(node, list) else node
