"""Take a module or a learner's cell apart: the source of each definition, what it uses, and where that comes from."""

import ast
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import ModuleType


class Source:
    """A module taken apart: the source of each top-level definition, what it uses, and what the imports mean.

    uses: all names in a definition; needs: those that must have a value before it; hints: those in its annotations.
    """

    def __init__(self, text: str) -> None:
        tree, lines, end = ast.parse(text), text.splitlines(), 0
        self.doc, self.parts, self.imports = ast.get_docstring(tree) or "", {}, {}
        self.uses, self.needs, self.hints = {}, {}, {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name: (a.name, "") for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
            elif not isinstance(node, ast.Expr):  # the docstring
                name = defined(node)
                # The comments above a definition belong to it.
                self.parts[name] = "\n".join(lines[end : node.end_lineno]).strip("\n")
                self.uses[name], self.needs[name] = names_in(node), set(needed(node))
                self.hints[name] = {hinted for each in ast.walk(node) for hinted in names_in(*hints_of(each))}
            end = node.end_lineno


def defined(node: ast.stmt) -> str:
    """The name that a top-level statement defines, or '' for the call of main at the end of a script."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        node = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ", ".join(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return getattr(node, "name", "")


def names_in(*nodes: ast.AST) -> set[str]:
    """All names in some code."""
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def hints_of(node: ast.AST) -> list[ast.expr]:
    """The annotations of a function, an argument or a variable."""
    hints = (getattr(node, "annotation", None), getattr(node, "returns", None))
    return [hint for hint in hints if hint]


def needed(node: ast.AST) -> Iterator[str]:
    """The names that Python looks up when it comes to a definition; those in a function's body wait for its call."""
    if isinstance(node, ast.Name):
        yield node.id
    later = [node.body] if isinstance(node, ast.Lambda) else []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        later = node.body
    for child in ast.iter_child_nodes(node):
        if child not in (*later, *hints_of(node)):
            yield from needed(child)


def source_of(thing: type | Callable) -> str:
    """The source of a function or class. Of a class from a cell, only its methods know where. Raises ValueError."""
    if inspect.isfunction(thing):
        return textwrap.dedent(inspect.getsource(thing))
    for method in vars(thing).values():
        if inspect.isfunction(method) and method.__qualname__.startswith(f"{thing.__qualname__}."):
            try:
                lines, at = inspect.findsource(method)
            except OSError:
                break
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.lineno <= at + 1 <= node.end_lineno:
                    start = min([node, *node.decorator_list], key=lambda n: n.lineno).lineno
                    return textwrap.dedent("".join(lines[start - 1 : node.end_lineno]))
    raise ValueError(f"{thing.__name__} has no source to be found: define it, and a method of it, in a cell")


def global_names(table: symtable.SymbolTable) -> set[str]:
    """The names that a definition takes from outside; its own variables may have names of the notebook's."""
    return {s.get_name() for s in table.get_symbols() if s.is_global()}.union(*map(global_names, table.get_children()))


def imported_as(name: str, scope: dict[str, object]) -> tuple[str, str]:
    """The import that gives a name its value, as a module's or a notebook's own source says it; ("", "") if none does.

    scope: the names of that module, or of the notebook, whose cells IPython keeps in `In`.
    """
    path = scope.get("__file__")
    texts = [Path(path).read_text()] if path else [cell for cell in scope.get("In", []) if name in cell]
    for text in reversed(texts):
        with suppress(SyntaxError):
            module, original = Source(text).imports.get(name, ("", ""))
            at_home = sys.modules.get(module)
            if at_home is not None and scope[name] is (getattr(at_home, original, None) if original else at_home):
                return module, original
    return "", ""


def home_of(name: str, value: object) -> tuple[str, str]:
    """An import that gives a name its value, wherever it came from, as (module, name in it or ""); ("", "") if none."""
    if isinstance(value, ModuleType):
        package, _, last = value.__name__.rpartition(".")
        return (package, last) if last == name and package else (value.__name__, "")
    original, home = getattr(value, "__name__", name), getattr(value, "__module__", None) or ""
    # What a module calls its own may be kept elsewhere: torch.relu has no __module__, F.max_pool2d a private one, and
    # Path another one in each version of Python.
    public = sorted((m for m in list(sys.modules) if "._" not in m and m != "__main__"), key=lambda m: (len(m), m))
    for module in [home.partition("._")[0], *public, home] if callable(value) else []:
        for known in (original, name):
            if vars(sys.modules.get(module, object)).get(known) is value:
                return module, known
    return "", ""


def from_cell(thing: type | Callable, others: Set[str] = frozenset()) -> Source:
    """Read what a learner defined in a cell as a Source. Raises ValueError if it needs what a script does not have.

    others: the names of what else goes into the script, and may be needed.
    """
    text, name = source_of(thing), thing.__name__
    source, scope = Source(text), vars(sys.modules[thing.__module__])
    source.uses[name] = global_names(symtable.symtable(text, name, "exec"))
    for used in sorted(source.uses[name] & scope.keys() - {name, *others}):
        home = imported_as(used, scope)
        if not home[0]:
            home = home_of(used, scope[used])
        if home[0] in ("", thing.__module__) or home[0].startswith("ddp_helpers"):
            raise ValueError(f"{name} uses {used}, which the script does not have: define it inside {name}")
        source.imports[used] = home
    return source
