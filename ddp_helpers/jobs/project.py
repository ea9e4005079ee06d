"""The project of a job's script: the modules that it imports from its folder.

`script_jobs` makes a `Project` on the login node, from texts: nothing is imported or run.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path

from ddp_helpers.jobs.job import FOLDER, JobError
from ddp_helpers.jobs.relative_paths import in_text, in_words
from ddp_tools.beside import imported_names, nodes_of, texts_beside

_MOST = 3  # relative paths that are named


@dataclass(frozen=True)
class Project:
    """A script, and the files that it imports from its folder, with their texts.

    folder: the folder from which it imports; "" for a script of the course.
    """

    name: str
    text: str
    folder: str = ""
    beside: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def around(cls, script: Path, text: str) -> "Project":
        """Find the project of a script.

        Raises JobError if no job file could name its folder, or the script is part of a package.
        """
        path = script.expanduser().absolute()
        path = path.resolve() if path.is_symlink() else path  # as Python resolves it
        folder = path.parent
        _check_relative_imports(path, text)
        texts = {file: own for file, own in texts_beside(text, folder).items() if file != path}
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

    def notices(self, words: Sequence[str], in_container: bool) -> Iterator[str]:
        """What a user should know, since a copy of the script runs in the run folder.

        words: the arguments of the script.
        """
        if self.beside:
            cure = "leave them as they are until the job has ended"
            if in_container:
                cure = f"mount this folder in the container, and {cure}"
            place = f"from {self.folder}, where the job finds them"
            yield f"{self.name} imports {self._names()} {place}: {cure}"
        if self.folder and any(_is_file(node) for node in nodes_of(self.text)):
            place = "in the job that is the run folder, with a copy of this file alone"
            yield f"{self.name} looks beside itself (__file__): {place}: give whole paths"
        for name, folder in self._lie_above().items():
            place = f"which is in {folder}, where the job does not look"
            cure = f"export PYTHONPATH='{folder}' before you submit it, or install {name}"
            yield f"{self.name} imports {name}, {place}: {cure}"
        found: dict[str, str] = {}
        for whole, where in self._relative_paths(words):
            found.setdefault(whole, where)
        if found:
            paths = [f"{where}: give {whole}" for whole, where in found.items()][:_MOST]
            paths += [f"and {len(found) - _MOST} more"] * (len(found) > _MOST)
            place = "are relative to the run folder in the job, and would not be found there"
            yield f"{self.name}: these paths {place}: {'; '.join(paths)}"

    def _texts(self) -> dict[Path, str]:
        """The texts of all its files; none for a script of the course."""
        return {Path(self.folder, self.name): self.text, **self.beside} if self.folder else {}

    def _relative_paths(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The places of relative paths of existing files, by full path; the arguments first."""
        folders = [str(Path.cwd()), *filter(None, [self.folder])]
        for name, whole in in_words(words, folders):
            yield whole, f"{name} (after --)"
        for file, text in self._texts().items():
            for line, name, whole in in_text(text, words, folders):
                if whole != str(Path(self.folder, self.name)):
                    yield whole, f"{name} ({file.relative_to(self.folder)}:{line})"

    def _lie_above(self) -> dict[str, Path]:
        """The modules that only a folder above the script has, each with this folder.

        Modules that an environment has are left out: the job may have the same environment.
        """
        found: dict[str, Path] = {}
        for text in self._texts().values():
            names = {name for name, *_ in imported_names(nodes_of(text)) if name}
            for name in names - sys.stdlib_module_names:
                others = [finder for finder in sys.meta_path if finder is not PathFinder]
                paths = [self.folder, *sys.path[1:]]  # the first is the folder of this command
                if not PathFinder.find_spec(name, paths) and not any(
                    finder.find_spec(name, None) for finder in others
                ):
                    folders = [Path(self.folder), *Path(self.folder).parents]
                    has_it = (it for it in folders[1:] if _has(it, name, folders))
                    found.update((name, it) for it in [*has_it][:1])
        return found

    def _names(self) -> str:
        """The files and folders in its folder that have its imports."""
        parts = [file.relative_to(self.folder).parts for file in self.beside]
        names = dict.fromkeys(f"{name}/" if rest else name for name, *rest in parts)
        return ", ".join(names)


def _is_file(node: ast.AST) -> bool:
    """Whether it is the name `__file__`, by which a script finds itself."""
    return isinstance(node, ast.Name) and node.id == "__file__"


def _has(folder: Path, name: str, around: Sequence[Path]) -> bool:
    """Whether a folder has a module: a file, a package, or a folder around the script."""
    spec = PathFinder.find_spec(name, [str(folder)])
    return spec is not None and (spec.origin is not None or folder / name in around)


def _check_relative_imports(script: Path, text: str) -> None:
    """Raise JobError if a script has a relative import, which only a package allows."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            above = [*takewhile(lambda it: (it / "__init__.py").exists(), script.parents)]
            root = max(above, [*script.parents][: node.level], key=len)[-1]
            module = ".".join(script.relative_to(root.parent).with_suffix("").parts)
            lack = f"{ast.unparse(node)!r} needs a package, and a job's script is in none"
            line = f'runpy.run_module("{module}", run_name="__main__", alter_sys=True)'
            cure = f"give a script next to {root.name}/ with only this line: import runpy; {line}"
            raise JobError(f"{script.name}, line {node.lineno}: {lack}: {cure}")
