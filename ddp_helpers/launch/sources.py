"""Take a module or a learner's cell apart: the source of each definition, and what it uses.

`scripts` puts a script together from such parts, in the learner's process. It needs no torch.
"""

import ast
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Import(NamedTuple):
    """Where an imported name comes from: `name` in `module`, or "" for the module itself."""

    module: str
    name: str


NOWHERE = Import("", "")


class Source:
    """A module taken apart.

    doc: its docstring; imports: what its imports mean, by the name here. By the name of each
    top-level definition, in their order: parts, its source, with the comments above it; uses, all
    names in it; needs, the names that must have a value before it; hints, those in its annotations.
    Of the call of main at the end of a script, that name is "".
    """

    def __init__(self, text: str) -> None:
        """Parse the module. Raises SyntaxError."""
        tree = ast.parse(text)
        self.doc = ast.get_docstring(tree) or ""
        self.imports: dict[str, Import] = {}
        self.parts: dict[str, str] = {}
        self.uses: dict[str, set[str]] = {}
        self.needs: dict[str, set[str]] = {}
        self.hints: dict[str, set[str]] = {}
        lines = text.splitlines()
        end = 0  # the last line of the statement above
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports |= _imported_names(node)
            elif not isinstance(node, ast.Expr):  # the docstring
                name = _defined_name(node)
                self.parts[name] = "\n".join(lines[end : node.end_lineno]).strip("\n")
                self.uses[name] = _names_in(node)
                self.needs[name] = set(_needed_names(node))
                hints = [hint for inner in ast.walk(node) for hint in _hints_of(inner)]
                self.hints[name] = _names_in(*hints)
            end = node.end_lineno or end


def _imported_names(node: ast.Import | ast.ImportFrom) -> dict[str, Import]:
    """Return what the names mean that an import statement defines."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name: Import(alias.name, "") for alias in node.names}
    module = node.module or ""
    return {alias.asname or alias.name: Import(module, alias.name) for alias in node.names}


def _defined_name(node: ast.stmt) -> str:
    """Return the name that a top-level statement defines, several with commas; "" if none."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ", ".join(name.id for name in ast.walk(target) if isinstance(name, ast.Name))
    return getattr(node, "name", "")


def _names_in(*nodes: ast.AST) -> set[str]:
    """Return all names in some code."""
    inner_nodes = [inner for node in nodes for inner in ast.walk(node)]
    return {node.id for node in inner_nodes if isinstance(node, ast.Name)}


def _hints_of(node: ast.AST) -> list[ast.expr]:
    """Return the annotations of a function, an argument or a variable."""
    hints = (getattr(node, "annotation", None), getattr(node, "returns", None))
    return [hint for hint in hints if hint]


def _needed_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that Python looks up when it comes to a definition.

    Those in the body of a function wait for its call.
    """
    if isinstance(node, ast.Name):
        yield node.id
    later: list[ast.AST] = list(_hints_of(node))
    if isinstance(node, ast.Lambda):
        later.append(node.body)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        later += node.body
    for child in ast.iter_child_nodes(node):
        if child not in later:
            yield from _needed_names(child)


# ---- a learner's definition


def from_cell(definition: type | Callable, others: Set[str] = frozenset()) -> Source:
    """Read what a learner defined in a cell as a Source.

    others: the names of what else goes into the script, and may be needed. Raises ValueError if the
    definition needs what a script does not have, or has no source.
    """
    name = definition.__name__
    text = _source_of(definition)
    source = Source(text)
    source.uses[name] = _global_names(symtable.symtable(text, name, "exec"))
    scope = vars(sys.modules[definition.__module__])
    for used in sorted(source.uses[name] & scope.keys() - {name, *others}):
        written = _import_in_source(used, scope)
        origin = written if written.module else _import_of_value(used, scope[used])
        of_the_notebook = origin.module in ("", definition.__module__)
        if of_the_notebook or origin.module.startswith("ddp_helpers"):
            cure = f"define it inside {name}"
            raise ValueError(f"{name} uses {used}, which the script does not have: {cure}")
        submodules = _submodules_in(text, used, scope)
        if written.module or not submodules:
            source.imports[used] = origin
        source.imports |= submodules
    return source


def _source_of(definition: type | Callable) -> str:
    """Return the source of a function or class. Raises ValueError if there is none.

    Of a class from a cell, only its methods know where it stands.
    """
    if inspect.isfunction(definition):
        return textwrap.dedent(inspect.getsource(definition))
    for method in vars(definition).values():
        if not inspect.isfunction(method):
            continue
        if not method.__qualname__.startswith(f"{definition.__qualname__}."):
            continue
        try:
            lines, index = inspect.findsource(method)
        except OSError:
            break
        for node in ast.walk(ast.parse("".join(lines))):
            if not isinstance(node, ast.ClassDef) or node.end_lineno is None:
                continue
            if node.lineno <= index + 1 <= node.end_lineno:
                decorators = [decorator.lineno for decorator in node.decorator_list]
                start = min([node.lineno, *decorators])
                return textwrap.dedent("".join(lines[start - 1 : node.end_lineno]))
    cure = "define it, and a method of it, in a cell"
    raise ValueError(f"{definition.__name__} has no source to be found: {cure}")


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a definition takes from outside.

    Its own variables may have names of the notebook's.
    """
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names.union(*map(_global_names, table.get_children()))


def _sources_of(scope: Mapping[str, object], name: str) -> Iterator[Source]:
    """Yield what may have given a name its value, the last first, apart from what is not Python.

    scope: the names of the module, or of the notebook, whose cells IPython keeps in `In`.
    """
    path, cells = scope.get("__file__"), scope.get("In")
    texts: list[str] = []
    if isinstance(path, str):
        texts = [Path(path).read_text()]
    elif isinstance(cells, list):
        texts = [cell for cell in cells if name in cell]
    for text in reversed(texts):
        with suppress(SyntaxError):
            yield Source(text)


def _import_in_source(name: str, scope: Mapping[str, object]) -> Import:
    """Return the import that gives a name its value, as its source has it; NOWHERE if none does."""
    for source in _sources_of(scope, name):
        origin = source.imports.get(name, NOWHERE)
        module = sys.modules.get(origin.module)
        value = getattr(module, origin.name, None) if origin.name else module
        if module is not None and scope[name] is value:
            return origin
    return NOWHERE


def _submodules_in(text: str, package: str, scope: Mapping[str, object]) -> dict[str, Import]:
    """Return the imports such as `import a.b` of modules that a text uses by their full names.

    What is imported only for its effect, such as registering a model, is not among them.
    """
    if sys.modules.get(package) is not scope[package]:
        return {}
    imports = [name for source in _sources_of(scope, package) for name in source.imports]
    dotted = {name for name in imports if name.startswith(f"{package}.") and name in text}
    return {name: Import(name, "") for name in dotted}


def _import_of_value(name: str, value: object) -> Import:
    """Return an import that gives a name its value, wherever it came from; NOWHERE if none does."""
    if isinstance(value, ModuleType):
        package, _, last = value.__name__.rpartition(".")
        return Import(package, last) if last == name and package else Import(value.__name__, "")
    if not callable(value):
        return NOWHERE
    original = getattr(value, "__name__", name)
    home = getattr(value, "__module__", None) or ""
    # What a module calls its own may be kept elsewhere: torch.relu has no __module__, F.max_pool2d
    # a private one, and Path another one in each version of Python.
    public = [module for module in list(sys.modules) if "._" not in module and module != "__main__"]
    public.sort(key=lambda module: (len(module), module))
    for module in [home.partition("._")[0], *public, home]:
        for known_name in (original, name):
            if vars(sys.modules.get(module, object)).get(known_name) is value:
                return Import(module, known_name)
    return NOWHERE
