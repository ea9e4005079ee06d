"""Write helpers out as one standalone script: the source of each part that it needs, in order, under one header."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from ddp_helpers import ROOT, __version__
from ddp_helpers.notebook.sources import Source, from_cell

PACKAGE = "ddp_helpers.rank.scripts"
NAMES = sorted(path.stem for path in (ROOT / PACKAGE.replace(".", "/")).glob("[a-z]*.py"))


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
        return re.sub("^MADE_FROM = .*", f'MADE_FROM = "{made}"', f"{top}{gap}{body}\n", flags=re.M)


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
    for module, original, here in imports:
        alias = here if here in (original or module, "") else f"{original or module} as {here}"
        names.setdefault(f"from {module} import " if original else "import ", []).append(alias)
    lines = [f"import {name}" for name in names.pop("import ", [])]
    lines += [start + ", ".join(sorted(found, key=order)) for start, found in names.items()]
    lines.sort(key=lambda line: (line.startswith("from"), line))
    own = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    return "\n".join([*own, "", *(line for line in lines if line not in own)])


def order(name: str) -> tuple[bool, str]:
    """Constants, then classes, then functions, as import sorters have it."""
    return (not name.isupper(), name[0].islower(), name)


def revision() -> str:
    """The git revision of the helpers, where they stand in a checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def standalone(name: str, replace: Sequence[type | Callable] = ()) -> str:
    """The text of the script `name`, with the revision that it was made from."""
    return Script(name, replace).text(f"ddp_helpers {__version__}{revision()}")


def write(name: str, path: str | Path, replace: Sequence[type | Callable] = ()) -> Path:
    """Write the script `name` to `path`; the learner's process calls it.

    replace: one's own Net, datasets or loss_and_right in the place of the script's, and classes that these need.
    Stops at an unknown script and a path that cannot be written. Raises ValueError for a thing without a place in it.
    """
    if name not in NAMES:
        refuse(f"no script is called {name!r}: choose one of {', '.join(NAMES)}")
    path, text = Path(path), standalone(name, replace)
    part = path.parent / f"{path.name}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        refuse(f"{path} cannot be written ({error.strerror}): choose another path")
    return path


def refuse(line: str) -> NoReturn:
    """Stop with one line. Only here is torch imported: a notebook that hands its job to Slurm needs none of it."""
    from ddp_helpers.rank.launchers import stop

    stop(line)
