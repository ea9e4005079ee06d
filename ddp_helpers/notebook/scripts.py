"""Write helpers out as one standalone script: the source of each part that it needs, in order, under one header."""

import ast
import hashlib
import inspect
import re
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from ddp_helpers import ROOT, __version__
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import stop


class Source:
    """A module taken apart: the source of each top-level definition, what it uses, and what the imports mean."""

    def __init__(self, text: str) -> None:
        tree, lines, end = ast.parse(text), text.splitlines(), 0
        self.doc, self.parts, self.uses, self.imports = ast.get_docstring(tree) or "", {}, {}, {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name: (a.name, "") for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
            elif not isinstance(node, ast.Expr):  # the docstring
                name = defined(node)
                # The comments above a definition belong to it.
                self.parts[name] = "\n".join(lines[end : node.end_lineno]).strip("\n")
                self.uses[name] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            end = node.end_lineno


def defined(node: ast.stmt) -> str:
    """The name that a top-level statement defines, or '' for the call of main at the end of a script."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        node = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ", ".join(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return getattr(node, "name", "")


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


PACKAGE = "ddp_helpers.rank.scripts"
FOLDER = ROOT / PACKAGE.replace(".", "/")
MARK = "# As it was written out, the SHA-256 of the lines above begins with "
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


class Script:
    """The parts of one script, gathered from its main module through everything that it uses."""

    def __init__(self, name: str, replace: Sequence[type | Callable] = ()) -> None:
        self.replaced = {thing.__name__: from_cell(thing, {one.__name__ for one in replace}) for thing in replace}
        self.sources: dict[str, Source] = {}  # by module, those that are imported first
        self.picked: set[tuple[str, str]] = set()  # (module, name)
        self.imports: set[tuple[str, str, str]] = set()  # (module, name in it or "", name here)
        main = f"{PACKAGE}.{name}"
        self.read(main)
        for part in self.sources[main].parts:
            self.pick(main, part)
        if unused := self.replaced.keys() - {name for _, name in self.picked}:
            raise ValueError(f"replace={sorted(unused)}: {name} has no such part")

    def read(self, module: str) -> None:
        """Read a module, after those it imports."""
        source = Source(Path(find_spec(module).origin).read_text())
        for imported, _ in source.imports.values():
            if imported.startswith("ddp_helpers") and imported not in self.sources:
                self.read(imported)
        self.sources[module] = source

    def pick(self, module: str, name: str) -> None:
        """Take this part, and all that it uses."""
        if (module, name) in self.picked:
            return
        self.picked.add((module, name))
        source = self.replaced.get(name, self.sources[module])
        for used in source.uses[name]:
            home, original = source.imports.get(used, ("", ""))
            if home.startswith("ddp_helpers"):
                self.pick(home, original)
            elif home:
                self.imports.add((home, original, used))
            elif used in self.replaced and not any(used in one.parts for one in self.sources.values()):
                self.join(module, name, used)  # a learner's class that another of theirs needs
            else:
                for part in self.sources[module].parts:
                    if used in part.split(", "):
                        self.pick(module, part)

    def join(self, module: str, name: str, used: str) -> None:
        """Put a part that the script does not have in front of the learner's part that uses it."""
        if (module, used) not in self.picked:
            own = self.replaced[name].parts
            own[name] = f"{self.replaced[used].parts[used]}\n\n\n{own[name]}"
            self.pick(module, used)

    def text(self, made: str = f"ddp_helpers {__version__}") -> str:
        """The whole file, which says what it was made from."""
        *helpers, main = self.sources
        title, _, launch = self.sources[main].doc.partition("\n")
        about = f"Written out from {made}, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:"
        top = f'"""{title}\n\n{about}\n{launch.strip()}\n"""\n\n{import_lines(self.imports)}\n'
        sections = []
        for module in [*helpers, main]:
            names = [name for name in self.sources[module].parts if (module, name) in self.picked]
            if parts := [self.replaced.get(name, self.sources[module]).parts[name] for name in names]:
                sections.append(spaced(parts))
        body = "\n\n\n".join(sections)
        gap = "\n\n" if re.match(r"(#.*\n)*(@|def |class )", body) else "\n"
        return f"{top}{gap}{body}\n".replace("ddp_helpers, imported", made)  # in the record, too


def spaced(parts: list[str]) -> str:
    """Definitions one below the other: two blank lines around functions and classes, none between constants."""
    text = parts[0]
    for above, below in pairwise(parts):
        plain = not any(re.search(r"^(@|def |class |if )", part, re.M) for part in (above, below))
        text += ("\n" if plain else "\n\n\n") + below
    return text


def import_lines(imports: set[tuple[str, str, str]]) -> str:
    """Import statements in the usual order: standard library, then the rest; `import` before `from`."""
    names: dict[str, list[str]] = {}
    # Constants, then classes, then functions, as import sorters have it.
    ordered = sorted(imports, key=lambda one: (not one[1].isupper(), one[1][:1].islower(), one[1], one[2]))
    for module, original, here in ordered:
        alias = here if here in (original or module, "") else f"{original or module} as {here}"
        names.setdefault(f"from {module} import " if original else "import ", []).append(alias)
    lines = [f"import {name}" for name in names.pop("import ", [])]
    lines += [start + ", ".join(found) for start, found in names.items()]
    lines.sort(key=lambda line: (line.startswith("from"), line))
    own = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    return "\n".join([*own, "", *(line for line in lines if line not in own)])


def revision() -> str:
    """The git revision of the helpers, where they stand in a checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def standalone(name: str, replace: Sequence[type | Callable] = ()) -> str:
    """The text of the script `name`, with the revision that it was made from."""
    return Script(name, replace).text(f"ddp_helpers {__version__}{revision()}")


def write(name: str, path: str | Path, replace: Sequence[type | Callable] = (), force: bool = False) -> Path:
    """Write the script `name` to `path`; the learner's process calls it.

    replace: one's own Net, datasets or loss_and_metrics in the place of the script's, and classes that these need.
    force: also over a file that is not as it was written here. Stops at an unknown script, and at a path that cannot
    be written or holds something else; nothing has changed then. Raises ValueError for a thing without a place in it.
    """
    if name not in NAMES:
        stop(f"no script is called {name!r}: choose one of {', '.join(NAMES)}")
    path, text = Path(path), marked(standalone(name, replace))
    try:
        if is_output(path):  # a terminal, a pipe, a device
            print(text, end="", flush=True) if path.samefile("/dev/stdout") else path.write_text(text)
        elif path.is_symlink():
            stop(f"{path} is a symbolic link: give the path of the file itself")
        elif not force and is_edited(path):
            stop(f"{path} holds what was not written here, or was edited since: give another path, or --force")
        else:
            write_whole(path, text.encode())
    except BrokenPipeError:  # whoever read has gone, as with `| head`
        raise
    except OSError as error:
        stop(f"{path} cannot be written ({error.strerror}): choose another path")
    return path


def marked(text: str) -> str:
    """The text with a last line that holds its digest, by which it is known as long as nobody edits it."""
    text = text.partition(f"\n{MARK}")[0].rstrip("\n") + "\n"
    return f"{text}{MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]}\n"


def is_edited(path: Path) -> bool:
    """Whether a file holds something that was not written here, or was edited since."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return bool(text.strip()) and text != marked(text)


def is_output(path: Path) -> bool:
    """Whether a path names this process's standard output, or else a terminal, a pipe or a device."""
    try:
        return path.exists() and (path.samefile("/dev/stdout") or not (path.is_file() or path.is_dir()))
    except OSError:  # of the path, or no /dev/stdout: what cannot be written is said when it is written
        return False
