"""Write helpers out as one standalone script: the source of each part that it needs, the script's own parts first."""

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from ddp_helpers import ROOT, __version__
from ddp_helpers.launch.sources import Source, from_cell
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import stop

PACKAGE = "ddp_helpers.rank.scripts"
FOLDER = ROOT / PACKAGE.replace(".", "/")
MARK = "# As it was written out, the SHA-256 of the lines above begins with "
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
MADE = f"ddp_helpers {__version__}"  # no revision of git: the same for everyone
Part = tuple[str, str]  # a module's name, "" for what only the learner's parts use; and the part's


class Script:
    """The parts of one script, gathered from its main module through everything that it uses."""

    def __init__(self, name: str, replace: Sequence[type | Callable] = ()) -> None:
        self.replaced = {thing.__name__: from_cell(thing, {one.__name__ for one in replace}) for thing in replace}
        self.sources: dict[str, Source] = {}  # by module, those that are imported first
        self.picked: set[Part] = set()
        self.imports: set[tuple[str, str, str]] = set()  # (module, name in it or "", name here)
        self.main = f"{PACKAGE}.{name}"
        self.read(self.main)
        # Where the learner's parts belong; "" for those that only their other parts use.
        self.homes = dict.fromkeys(self.replaced, "")
        self.homes |= {part: module for module, source in self.sources.items() for part in source.parts}
        for part in self.sources[self.main].parts:
            self.pick((self.main, part))
        if unused := self.replaced.keys() - {name for _, name in self.picked}:
            raise ValueError(f"replace={sorted(unused)}: {name} has no such part")

    def read(self, module: str) -> None:
        """Read a module, after those it imports."""
        source = Source(Path(find_spec(module).origin).read_text())
        for imported, _ in source.imports.values():
            if imported.startswith("ddp_helpers") and imported not in self.sources:
                self.read(imported)
        self.sources[module] = source

    def source(self, part: Part) -> Source:
        """Where a part's source stands: in what the learner gave, or else in its module."""
        module, name = part
        return self.replaced[name] if name in self.replaced else self.sources[module]

    def meant(self, part: Part, used: str) -> Part | None:
        """The part that another one means by a name; None if it means none of this script."""
        module, name = part
        home, original = self.source(part).imports.get(used, ("", ""))
        if home:
            return (home, original) if home.startswith("ddp_helpers") else None
        if name in self.replaced and used in self.replaced:
            return self.homes[used], used
        parts = self.sources[module].parts if module else ()
        return next(((module, other) for other in parts if used in other.split(", ")), None)

    def pick(self, part: Part) -> None:
        """Take this part, and all that it uses."""
        if part in self.picked:
            return
        self.picked.add(part)
        source = self.source(part)
        for used in source.uses[part[1]]:
            if other := self.meant(part, used):
                self.pick(other)
            elif used in source.imports:
                self.imports.add((*source.imports[used], used))

    def ordered(self) -> list[Part]:
        """The parts as they are read: the script's own, what a learner replaces, the others; its last lines last.

        But what has to be there when Python comes to a part stands before it, with all that it calls.
        """
        modules = [self.main, *(module for module in self.sources if module != self.main)]
        usual = [(module, name) for module in modules for name in self.sources[module].parts]
        usual += [("", name) for name in self.replaced if not self.homes[name]]
        usual = sorted((part for part in usual if part in self.picked), key=self.place)
        order, deep, begun = [], set(), []  # deep: those before which all stands that they call

        def put(part: Part, called: bool) -> None:
            if part in begun or part in deep or (part in order and not called):
                return
            begun.append(part)
            source, name = self.source(part), part[1]
            first = {self.meant(part, used) for used in (source.uses if called else source.needs)[name]}
            for other in usual:
                if other in first:
                    put(other, called=True)
            begun.remove(part)
            if called:
                deep.add(part)
            if part not in order:
                order.append(part)

        for part in usual:
            put(part, called=False)
        return order

    def place(self, part: Part) -> int:
        """The place of a part among the others, where nothing forces another one."""
        module, name = part
        if module == self.main:
            return {"": 9, "train": 1, "main": 2}.get(name, 3 if is_block(self.sources[module].parts[name]) else 0)
        return 4 if not module or self.sources[module].parts[name].startswith("# YOUR ") else 5

    def text(self) -> str:
        """The whole file, which says what it was made from."""
        title, _, launch = self.sources[self.main].doc.partition("\n")
        about = f"Written out from {MADE}, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:"
        order = self.ordered()
        hints = [self.meant(part, name) for part in order for name in self.source(part).hints[part[1]]]
        later = "from __future__ import annotations  # they name classes that come later\n\n"
        imports = (later if any(hints) else "") + import_lines(self.imports)
        body = spaced([self.source(part).parts[part[1]] for part in order])
        gap = "\n\n" if is_block(body) else "\n"
        text = f'"""{title}\n\n{about}\n{launch.strip()}\n"""\n\n{imports}\n{gap}{body}\n'
        return text.replace("ddp_helpers, imported", MADE)  # in the record, too


def is_block(part: str) -> bool:
    """Whether a part begins with a function or a class, and so with two blank lines."""
    return bool(re.match(r"(#.*\n|\n)*(@|async |def |class |if )", part))


def spaced(parts: list[str]) -> str:
    """Definitions one below the other: two blank lines around functions and classes, none between constants."""
    text = parts[0]
    for above, below in pairwise(parts):
        between = "\n\n" if below.startswith("#") else "\n"
        text += ("\n\n\n" if is_block(above) or is_block(below) else between) + below
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


def write(name: str, path: str | Path, replace: Sequence[type | Callable] = (), force: bool = False) -> Path:
    """Write the script `name` to `path`; the learner's process calls it.

    replace: one's own Net, datasets or loss_and_metrics in the place of the script's, and classes that these need.
    force: also over a file that is not as it was written here. Stops at an unknown script, and at a path that cannot
    be written or holds something else; nothing has changed then. Raises ValueError for a thing without a place in it.
    """
    if name not in NAMES:
        stop(f"no script is called {name!r}: choose one of {', '.join(NAMES)}")
    path, text = Path(path), marked(Script(name, replace).text())
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
