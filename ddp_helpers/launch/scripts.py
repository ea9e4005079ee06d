"""Write helpers out as one standalone script: what it needs of each module, its own parts first.

The learner's process calls it, also with nothing installed: it needs Python alone.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ddp_helpers import ROOT, __version__
from ddp_helpers.launch.sources import Source, from_cell
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import stop

PACKAGE = "ddp_helpers.rank.scripts"
FOLDER = ROOT / PACKAGE.replace(".", "/")
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
MARK = "# As it was written out, the SHA-256 of the lines above begins with "
MADE_FROM = f"ddp_helpers {__version__}"  # no revision of git: the same for everyone


class Part(NamedTuple):
    """A definition in a module, "" for what only the learner's definitions use."""

    module: str
    name: str


class _ScriptImport(NamedTuple):
    """An import of the script: `name` in `module`, or "" for the module itself, under an alias."""

    module: str
    name: str
    alias: str


class Script:
    """The parts of one script, gathered from its main module through everything that it uses."""

    def __init__(self, name: str, replace: Sequence[type | Callable] = ()) -> None:
        """Gather the parts of the script `name`, with a learner's own in the place of some.

        Raises ValueError for one that has no place in the script, or cannot stand in it.
        """
        own_names = {definition.__name__ for definition in replace}
        self._replaced: dict[str, Source] = {}
        for definition in replace:
            self._replaced[definition.__name__] = from_cell(definition, own_names)
        self._main = f"{PACKAGE}.{name}"
        self._sources: dict[str, Source] = {}  # by module, those that are imported first
        self._read(self._main)
        # The modules where the learner's parts belong; "" for what only their other parts use.
        self._homes = dict.fromkeys(self._replaced, "")
        for module, source in self._sources.items():
            self._homes |= dict.fromkeys(source.parts, module)
        self._picked: set[Part] = set()
        self._imports: set[_ScriptImport] = set()
        for part_name in self._sources[self._main].parts:
            self._pick(Part(self._main, part_name))
        if unused := self._replaced.keys() - {part.name for part in self._picked}:
            raise ValueError(f"replace={sorted(unused)}: {name} has no such part")

    def _read(self, module: str) -> None:
        """Read a module, after those of ours that it imports."""
        spec = find_spec(module)
        assert spec and spec.origin, "our own modules are files"
        source = Source(Path(spec.origin).read_text())
        for origin in source.imports.values():
            if origin.module.startswith("ddp_helpers") and origin.module not in self._sources:
                self._read(origin.module)
        self._sources[module] = source

    def _source(self, part: Part) -> Source:
        """Return where a part's source stands: in what the learner gave, or else in its module."""
        return self._replaced.get(part.name) or self._sources[part.module]

    def _part_of(self, user: Part, used: str) -> Part | None:
        """Return the part that another part means by a name; None for none of this script."""
        origin = self._source(user).imports.get(used)
        if origin and origin.module:
            ours = origin.module.startswith("ddp_helpers")
            return Part(origin.module, origin.name) if ours else None
        if user.name in self._replaced and used in self._replaced:
            return Part(self._homes[used], used)
        for name in self._sources[user.module].parts if user.module else ():
            if used in name.split(", "):
                return Part(user.module, name)
        return None

    def _pick(self, part: Part) -> None:
        """Take this part, and all that it uses."""
        if part in self._picked:
            return
        self._picked.add(part)
        source = self._source(part)
        for used in source.uses[part.name]:
            if used_part := self._part_of(part, used):
                self._pick(used_part)
                continue
            for name, origin in source.imports.items():
                if name.partition(".")[0] == used:  # `import a.b` defines a
                    self._imports.add(_ScriptImport(origin.module, origin.name, name))

    def _ordered_parts(self) -> list[Part]:
        """Return the parts as they are read.

        First the script's own, then what a learner replaces, then the others; its last lines come
        last. But what has to be there when Python comes to a part stands before it, with all that
        it calls.
        """
        modules = [self._main, *(module for module in self._sources if module != self._main)]
        parts = [Part(module, name) for module in modules for name in self._sources[module].parts]
        parts += [Part("", name) for name in self._replaced if not self._homes[name]]
        parts = sorted((part for part in parts if part in self._picked), key=self._position)
        order: list[Part] = []
        complete: set[Part] = set()  # before these stands all that they call
        begun: list[Part] = []

        def put(part: Part, called: bool) -> None:
            if part in begun or part in complete or (part in order and not called):
                return
            begun.append(part)
            source = self._source(part)
            names = (source.uses if called else source.needs)[part.name]
            first = {self._part_of(part, name) for name in names}
            for other in parts:
                if other in first:
                    put(other, called=True)
            begun.remove(part)
            if called:
                complete.add(part)
            if part not in order:
                order.append(part)

        for part in parts:
            put(part, called=False)
        return order

    def _position(self, part: Part) -> int:
        """Return where a part stands among the others, if nothing forces another order."""
        text = self._sources[part.module].parts[part.name] if part.module else ""
        if part.module == self._main:
            last_lines, functions, constants = 9, 3, 0
            named = {"": last_lines, "train": 1, "main": 2}
            return named.get(part.name, functions if _is_block(text) else constants)
        return 4 if not part.module or text.startswith("# YOUR ") else 5

    def text(self) -> str:
        """Return the whole file, which says what it was made from."""
        title, _, launch = self._sources[self._main].doc.partition("\n")
        about = f"Written out from {MADE_FROM}, MIT licence."
        about += " Needs torch 2.10 or newer, and torchvision. Launch:"
        parts = self._ordered_parts()
        body = _spaced([self._source(part).parts[part.name] for part in parts])
        imports = _import_lines(self._imports)
        if any(self._names_a_part_in_hints(part) for part in parts):
            later = "from __future__ import annotations  # they name classes that come later"
            imports = f"{later}\n\n{imports}"
        gap = "\n\n" if _is_block(body) else "\n"
        text = f'"""{title}\n\n{about}\n{launch.strip()}\n"""\n\n{imports}\n{gap}{body}\n'
        return text.replace("ddp_helpers, imported", MADE_FROM)  # in the record, too

    def _names_a_part_in_hints(self, part: Part) -> bool:
        """Say whether an annotation of this part names a part of the script."""
        hints = self._source(part).hints[part.name]
        return any(self._part_of(part, name) for name in hints)


def _is_block(text: str) -> bool:
    """Say whether a part begins with a function or a class, and so with two blank lines."""
    return bool(re.match(r"(#.*\n|\n)*(@|async def |class |def |if )", text))


def _spaced(texts: list[str]) -> str:
    """Join parts: two blank lines around functions and classes, none between constants."""
    joined = texts[0]
    for above, below in pairwise(texts):
        if _is_block(above) or _is_block(below):
            joined += "\n\n\n" + below
        elif below.startswith("#"):
            joined += "\n\n" + below
        else:
            joined += "\n" + below
    return joined


def _import_lines(imports: set[_ScriptImport]) -> str:
    """Return import statements in the usual order: standard library, then the rest.

    `import` comes before `from`; of a module, constants come first, then classes, then functions.
    """
    names: dict[str, list[str]] = {}  # by what stands before them
    for module, name, alias in sorted(imports, key=_import_order):
        original = name or module
        renamed = original if alias == original else f"{original} as {alias}"
        names.setdefault(f"from {module} import " if name else "import ", []).append(renamed)
    lines = [f"import {name}" for name in names.pop("import ", [])]
    lines += [start + ", ".join(imported) for start, imported in names.items()]
    lines.sort(key=lambda line: (line.startswith("from"), line))
    standard = [line for line in lines if _module_of(line) in sys.stdlib_module_names]
    return "\n".join([*standard, "", *(line for line in lines if line not in standard)])


def _import_order(imported: _ScriptImport) -> tuple[bool, bool, str, str]:
    name = imported.name
    return not name.isupper(), name[:1].islower(), name, imported.alias


def _module_of(import_line: str) -> str:
    return import_line.split()[1].split(".")[0]


# ---- writing


def write_script(
    name: str,
    path: str | Path,
    replace: Sequence[type | Callable] = (),
    force: bool = False,
) -> Path:
    """Write the script `name` to `path`.

    replace: one's own Net, datasets or loss_and_metrics in the place of the script's, and classes
    that these need. force: also over a file that is not as it was written here. Stops, with nothing
    changed, at an unknown script, and at a path that cannot be written or holds something else.
    Raises ValueError for a definition without a place in the script.
    """
    if name not in NAMES:
        stop(f"no script is called {name!r}: choose one of {', '.join(NAMES)}")
    path, text = Path(path), _marked(Script(name, replace).text())
    try:
        if is_output(path):  # a terminal, a pipe, a device
            if path.samefile("/dev/stdout"):
                print(text, end="", flush=True)
            else:
                path.write_text(text)
        elif path.is_symlink():
            stop(f"{path} is a symbolic link: give the path of the file itself")
        elif not force and _is_edited(path):
            cure = "give another path, or --force"
            stop(f"{path} holds what was not written here, or was edited since: {cure}")
        else:
            write_whole(path, text.encode())
    except BrokenPipeError:  # whoever read has gone, as with `| head`
        raise
    except OSError as error:
        stop(f"{path} cannot be written ({error.strerror}): choose another path")
    return path


def _marked(text: str) -> str:
    """Return the text with a last line that holds its digest: it tells whether it was edited."""
    text = text.partition(f"\n{MARK}")[0].rstrip("\n") + "\n"
    return f"{text}{MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]}\n"


def _is_edited(path: Path) -> bool:
    """Say whether a file holds something that was not written here, or was edited since."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return bool(text.strip()) and text != _marked(text)


def is_output(path: Path) -> bool:
    """Say whether a path names this process's stdout, or else a terminal, a pipe or a device."""
    try:
        if not path.exists():
            return False
        return path.samefile("/dev/stdout") or not (path.is_file() or path.is_dir())
    except OSError:  # of the path, or no /dev/stdout: writing will say what is wrong
        return False
