"""Write a script of the course to a file, with your own parts in place of the script's.

A script in `rank/scripts` is a complete program, and a module that notebooks and helpers import
from. The driver process calls this, even with nothing installed: it needs only Python.
"""

import ast
from collections.abc import Set
from pathlib import Path
from typing import TypeGuard

from ddp_helpers import ROOT
from ddp_helpers.rank.files import write_atomically
from ddp_helpers.rank.launchers import stop
from ddp_tools import PlainError

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def write_script(name: str, path: str | Path, parts: str | Path | None = None) -> Path:
    """Write the script `name` to `path`; a different file there is kept as PATH.old.

    parts: a file with your own Net, datasets, loss_and_metrics or make_optimizer, and the code that
    these need, which replaces the script's. A path of "-" is stdout. Stops, with nothing changed,
    at an unknown script and at a path that cannot be written. Raises PlainError, with nothing
    changed, at parts that do not fit.
    """
    if name not in NAMES:
        stop(f"no script is called {name!r}: choose one of {', '.join(NAMES)}")
    try:
        text = script_text(name, parts)
    except (OSError, SyntaxError, ValueError) as error:
        raise PlainError(f"{parts} cannot be used in {name}: {error}") from None
    if str(path) in ("-", "/dev/stdout"):
        print(text, end="", flush=True)
        return Path(path)
    path = Path(path)
    try:
        before = path.read_bytes() if path.is_file() else b""
        if before.strip() and before != text.encode():
            write_atomically(path.with_name(f"{path.name}.old"), before)
        write_atomically(path.resolve(), text.encode())
    except OSError as error:
        stop(f"{path} cannot be written ({error.strerror}): choose another path")
    return path


def script_text(name: str, parts: str | Path | None = None) -> str:
    """Return the text of a script, with a file's definitions in place of its own."""
    text = _joined(FOLDER / f"{name}.py")
    return text if parts is None else _with_parts(text, Path(parts).read_text())


def places(text: str) -> dict[str, tuple[int, int]]:
    """Return the first and last line of each function and class of a program, with decorators."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = begin - 1, node.end_lineno or begin
    return found


def _with_parts(text: str, own: str) -> str:
    """Insert a file, without its docstring and `main`, after the imports of a script.

    Its definitions replace the script's. Raises ValueError if it defines no part of the script, or
    imports a helper of the course, or a different thing by a name that the script imports.
    """
    theirs, mine = _imports_in(text), _imports_in(own)
    if helpers := [name for name, origin in mine.items() if origin.startswith("ddp_helpers")]:
        raise ValueError(f"it imports {helpers[0]} from the course, which a script does not have")
    for name in theirs.keys() & mine.keys():
        if theirs[name] != mine[name]:
            raise ValueError(f"{name} is {mine[name]} in it, and {theirs[name]} in the script")
    parts = places(own).keys() - {"main"}
    if not parts & places(text).keys():
        raise ValueError(f"it defines none of {', '.join(places(text))}")
    own = _without(own.partition('if __name__ == "__main__":')[0], {"main"})
    module = ast.parse(own)
    begin = (module.body[0].end_lineno or 0) if ast.get_docstring(module) else 0
    text = _without(text, parts)
    at = max(node.end_lineno or 0 for node in ast.parse(text).body if _is_import(node))
    lines = text.splitlines()
    return "\n".join([*lines[:at], *own.splitlines()[begin:], "", "", *lines[at:], ""])


def _without(text: str, names: Set[str]) -> str:
    """Remove these functions and classes from a program."""
    lines = text.splitlines()
    found = places(text)
    for begin, end in sorted((found[name] for name in found.keys() & names), reverse=True):
        del lines[begin:end]
    return "\n".join(lines)


def _imports_in(text: str) -> dict[str, str]:
    """Map the names that the imports at the top of a program bind to what they mean."""
    found = {}
    for node in filter(_is_import, ast.parse(text).body):
        for alias in node.names:
            module = getattr(node, "module", "")
            name = alias.asname or alias.name.partition(".")[0]
            means = alias.name if alias.asname else name  # `import a.b` binds a, as `import a` does
            found[name] = f"{module}.{alias.name}" if module else means
    return found


def _joined(path: Path) -> str:
    """Return a script's text; if it imports from the course, followed by those modules."""
    modules: dict[Path, str] = {}
    imports: set[str] = set()
    names: dict[str, set[str]] = {}  # imported from each module

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
