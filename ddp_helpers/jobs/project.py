"""The project of a job's script: what it imports from the folder in which it lies.

`script_jobs` makes a `Project` on the login node, from texts: nothing is imported or run.
"""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from ddp_helpers.jobs.job import FOLDER, JobError

Dotted = list[str]  # the parts of a module's dotted name


@dataclass(frozen=True)
class Project:
    """A script, and the files that it imports from its folder, with their texts.

    folder: from which Python lets it import; "" for a script of the course's.
    """

    name: str
    text: str
    folder: str = ""
    beside: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def around(cls, script: Path, text: str) -> "Project":
        """Find the project of a script. Raises JobError where no job file could name its folder."""
        path = script.expanduser().absolute()
        path = path.resolve() if path.is_symlink() else path  # as Python takes it
        folder = path.parent
        texts = {file: own for file, own in _texts_beside(text, folder).items() if file != path}
        project = cls(script.name, text, str(folder), texts)
        if FOLDER.fullmatch(project.folder):
            return project
        if texts:
            lack = f"imports {project._names()} from {project.folder!r}, which no job can name"
            raise JobError(f"{script.name} {lack}: rename that folder, without : and line breaks")
        return cls(script.name, text)

    @property
    def whole_text(self) -> str:
        """The texts of all its files."""
        return "\n".join([self.text, *self.beside.values()])

    def notices(self, in_container: bool) -> Iterator[str]:
        """What a person should know of it, since a copy of the script runs, in the run folder."""
        if self.beside:
            cure = "leave them as they are until the job has ended"
            if in_container:
                cure = f"mount this folder in the container, and {cure}"
            place = f"from {self.folder}, where the job finds them"
            yield f"{self.name} imports {self._names()} {place}: {cure}"
        if self.folder and any(_is_file(node) for node in _nodes(self.text)):
            place = "in the job that is the run folder, with a copy of this file alone"
            yield f"{self.name} looks beside itself (__file__): {place}: give whole paths"

    def _names(self) -> str:
        """The files and folders that lie in its folder, and have what it imports."""
        parts = [file.relative_to(self.folder).parts for file in self.beside]
        names = dict.fromkeys(f"{name}/" if rest else name for name, *rest in parts)
        return ", ".join(names)


def _texts_beside(text: str, folder: Path) -> dict[Path, str]:
    """Map the files below a folder that a script in it imports, and those that these import.

    text: of the script. The text of a compiled module is empty. A name that is only put together
    when the script runs is not found.
    """
    texts: dict[Path, str] = {}
    unread: list[tuple[str, Dotted]] = [(text, [])]  # with the package in which a text lies
    while unread:
        for name in _imported_names(*unread.pop()):
            for path, package in _files_of(name, folder):
                if path not in texts:
                    texts[path] = ""
                    with suppress(OSError, ValueError):  # no text, as that of a compiled module
                        texts[path] = path.read_text()
                    unread.append((texts[path], package))
    return texts


def _is_file(node: ast.AST) -> bool:
    """Whether it is the name `__file__`, by which a script finds itself."""
    return isinstance(node, ast.Name) and node.id == "__file__"


def _nodes(text: str) -> Iterator[ast.AST]:
    """All nodes of a text's syntax tree; none where it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    yield from ast.walk(tree)


def _imported_names(text: str, package: Dotted) -> Iterator[Dotted]:
    """The dotted names that the import statements of a text may mean, wherever they stand.

    package: in which the text lies, for `from . import`.
    """
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = node.module.split(".") if node.module else []
            yield from ([*above, *module, alias.name] for alias in node.names)


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
