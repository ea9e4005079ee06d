"""Write a script of the course to a file, with a learner's own parts in the place of its.

A script in `rank/scripts` is a whole program, and a module that notebooks and helpers import from.
The learner's process calls this, also with nothing installed: it needs Python alone.
"""

import ast
import builtins
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from ddp_helpers import ROOT
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import stop

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def write_script(name: str, path: str | Path, replace: Sequence[type | Callable] = ()) -> Path:
    """Write the script `name` to `path`; another text that is there is kept as PATH.old.

    replace: one's own Net, datasets, loss_and_metrics or make_optimizer in the place of the
    script's, and what these need. "-" is stdout. Stops, with nothing changed, at an unknown script
    and at a path that cannot be written. Raises ValueError for a part that cannot stand there.
    """
    if name not in NAMES:
        stop(f"no script is called {name!r}: choose one of {', '.join(NAMES)}")
    text = script_text(name, replace)
    if str(path) in ("-", "/dev/stdout"):
        print(text, end="", flush=True)
        return Path(path)
    path = Path(path)
    try:
        before = path.read_bytes() if path.is_file() else b""
        if before.strip() and before != text.encode():
            write_whole(path.with_name(f"{path.name}.old"), before)
        write_whole(path.resolve(), text.encode())
    except OSError as error:
        stop(f"{path} cannot be written ({error.strerror}): choose another path")
    return path


def script_text(name: str, replace: Sequence[type | Callable] = ()) -> str:
    """Return the text of a script; each part of `replace` stands where that of its name stood.

    Parts of other names stand before the first of them. Raises ValueError.
    """
    text = _joined(FOLDER / f"{name}.py")
    lines, places = text.splitlines(), parts(text)
    given = {part.__name__: _source_of(part) for part in replace}
    if given and not given.keys() & places.keys():
        raise ValueError(f"{name} has no part called {' or '.join(given)}")
    imports = sorted({line for part in replace for line in _imports_of(part, text, given)})
    first = min(places[each] for each in given if each in places) if given else 0
    more = [f"{source}\n\n" for each, source in given.items() if each not in places]
    edits = [(places[each], given[each]) for each in given if each in places]
    for (begin, end), source in sorted(edits, reverse=True):
        lines[begin:end] = [source]
        if (begin, end) == first:
            lines[begin:begin] = more
    at = max(node.end_lineno or 0 for node in ast.parse(text).body if _is_import(node))
    return "\n".join([*lines[:at], *imports, *lines[at:]]) + "\n"


def parts(text: str) -> dict[str, tuple[int, int]]:
    """Say of each function and class of a program in which lines it stands, with its decorators."""
    places = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            places[node.name] = begin - 1, node.end_lineno or begin
    return places


def _joined(path: Path) -> str:
    """Return a script's text; where it imports from the course, followed by those modules whole."""
    modules: dict[Path, str] = {}
    imports: set[str] = set()
    names: dict[str, set[str]] = {}  # that are imported from each module

    def read(module: Path) -> None:
        text = module.read_text()
        body, end = "", 0
        for node in ast.parse(text).body:
            module_name = getattr(node, "module", None) or ""
            if module_name.startswith("ddp_helpers"):
                origin = ROOT / f"{module_name.replace('.', '/')}.py"
                if origin not in modules:
                    read(origin)
            elif _is_import(node):
                if module_name:
                    names.setdefault(module_name, set()).update(map(ast.unparse, node.names))
                else:
                    imports.add(ast.unparse(node))
            elif end:  # after the docstring
                body += "\n".join(["", *text.splitlines()[end : node.end_lineno]])
            end = node.end_lineno or end
        modules[module] = body

    read(path)
    text = path.read_text()
    if len(modules) == 1:
        return text
    own, _, last = modules.pop(path).rpartition('if __name__ == "__main__":')
    head = f'"""{ast.get_docstring(ast.parse(text))}\n"""\n\nfrom __future__ import annotations\n'
    bodies = [own, *modules.values(), f'if __name__ == "__main__":{last}']
    body = "\n\n\n".join(each.strip("\n") for each in bodies)
    imports |= {f"from {module} import {', '.join(sorted(names[module]))}" for module in names}
    return "\n".join([head, *sorted(imports), "\n", body, ""])


def _is_import(node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
    return isinstance(node, ast.Import | ast.ImportFrom)


# ---- a learner's parts


def _source_of(part: type | Callable) -> str:
    """Return the source of a function or a class; of a class in a cell, by one of its methods.

    Raises ValueError where none is to be found.
    """
    methods: list[Any] = [each for each in vars(part).values() if inspect.isfunction(each)]
    for known in [part, *methods] if isinstance(part, type) else [part]:
        with suppress(OSError, TypeError):
            text = "".join(inspect.findsource(known)[0])
            if part.__name__ in (places := parts(text)):
                begin, end = places[part.__name__]
                return "\n".join(text.splitlines()[begin:end])
    with suppress(OSError, TypeError):
        return textwrap.dedent(inspect.getsource(part)).rstrip()
    cure = "define it, and a method of it, in a cell or a file"
    raise ValueError(f"{part.__name__} has no source to be found: {cure}")


def _imports_of(part: type | Callable, text: str, given: dict[str, str]) -> Iterator[str]:
    """Yield the imports that a part needs, and the script does not have.

    Raises ValueError for a name that means something else, or nothing, in the script.
    """
    scope = vars(sys.modules[part.__module__])
    own, theirs = _imports_in(_texts_of(scope)), _imports_in([text])
    known = symtable.symtable(text, "script", "exec").get_identifiers()
    for name in sorted(_globals(symtable.symtable(given[part.__name__], "part", "exec"))):
        if name in given or hasattr(builtins, name):
            continue
        lines, has, problem = own.get(name, {}), theirs.get(name, {}), ""
        if name in scope and not lines:
            problem = "which stands outside of it: give it to replace=, too, or define it inside"
        elif any(" ddp_helpers" in line for line in lines):
            if name in known:  # the script's own
                continue
            problem = "a helper of the course, which the script does not have"
        elif name not in scope and name not in known:
            problem = "which is nowhere defined"
        elif has and {*lines.values()} - {*has.values()}:
            problem = f"which the script has from elsewhere: {' and '.join(has)}"
        elif name in known and not has and lines:
            problem = "which is a part of the script: choose another name"
        if problem:
            raise ValueError(f"{part.__name__} uses {name}, {problem}")
        # Of a module that the script has only the submodules are missing.
        missing = lines.keys() - has.keys()
        yield from (each for each in missing if not has or each.startswith(f"import {name}."))


def _texts_of(scope: dict) -> list[str]:
    """Return the text in which a part was defined: a file, or the cells of the notebook."""
    if isinstance(path := scope.get("__file__"), str):
        return [Path(path).read_text()]
    magic = ("%", "!")
    return ["\n".join(x for x in cell.splitlines() if x[:1] not in magic) for cell in scope["In"]]


def _imports_in(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """List by the name that they define the imports in some texts, each with what it means."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        with suppress(SyntaxError):  # a cell that is no Python
            for node in filter(_is_import, ast.walk(ast.parse(text))):
                module = getattr(node, "module", "")
                for alias in node.names:
                    origin = f"{module}.{alias.name}" if module else alias.name
                    one = ast.ImportFrom(module, [alias], 0) if module else ast.Import([alias])
                    name = alias.asname or alias.name.partition(".")[0]
                    means = origin if module or alias.asname else name
                    found.setdefault(name, {})[ast.unparse(one)] = means
    return found


def _globals(table: symtable.SymbolTable) -> set[str]:
    """List the names that a piece of code takes from outside; its own variables are others."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names.union(*map(_globals, table.get_children()))
