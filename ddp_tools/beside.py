"""Find the files that a script imports from its own folder, by reading the sources.

`ddp-course job` and `ddp-course plan` call it: nothing is imported or run, and torch is not needed.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

Dotted = list[str]  # the parts of a module's dotted name
_IMPORTING = ("import_module", "run_module", "__import__")  # calls with such a name as argument


def texts_beside(text: str, folder: Path) -> dict[Path, str]:
    """Map the files below a folder that a script in it imports, directly or not, to their texts.

    text: the script's. A compiled module has an empty text. A module name that is computed at run
    time is not found.
    """
    texts: dict[Path, str] = {}
    unread: list[tuple[str, Dotted]] = [(text, [])]  # with the package of each text
    while unread:
        own, within = unread.pop()
        for name in imported_names(nodes_of(own), within):
            for path, package in _files_of(name, folder):
                if path not in texts:
                    texts[path] = ""
                    with suppress(OSError, ValueError):  # no text, as in a compiled module
                        texts[path] = path.read_text()
                    unread.append((texts[path], package))
    return texts


def nodes_of(text: str) -> Iterator[ast.AST]:
    """All nodes of a text's syntax tree; none if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    yield from ast.walk(tree)


def called(call: ast.Call) -> str:
    """The last part of a called name."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def imported_names(nodes: Iterable[ast.AST], package: Sequence[str] = ()) -> Iterator[Dotted]:
    """The dotted names that all imports among a text's nodes may mean.

    package: the text's, to resolve `from . import`; without it, relative imports are left out.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = node.module.split(".") if node.module else []
            yield from ([*above, *module, alias.name] for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in _IMPORTING:
            names = [getattr(argument, "value", None) for argument in node.args[:1]]
            yield from (name.split(".") for name in names if isinstance(name, str))


def _files_of(name: Dotted, folder: Path) -> Iterator[tuple[Path, Dotted]]:
    """The files below a folder that importing a name would read, each with its package."""
    places = [str(folder)]
    for count, part in enumerate(name, 1):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return
        is_package = spec.submodule_search_locations is not None
        if spec.origin and spec.has_location:
            yield Path(spec.origin), name[: count if is_package else count - 1]
        if not is_package:
            return
        places = [*(spec.submodule_search_locations or ())]
