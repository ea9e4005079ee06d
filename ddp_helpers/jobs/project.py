"""The project of a job's script: what it imports from the folder in which it lies.

`script_jobs` makes a `Project` on the login node, from texts: nothing is imported or run.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddp_helpers.jobs.job import FOLDER, JobError
from ddp_tools.beside import nodes_of, texts_beside


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

    def notices(self, in_container: bool) -> Iterator[str]:
        """What a person should know of it, since a copy of the script runs, in the run folder."""
        if self.beside:
            cure = "leave them as they are until the job has ended"
            if in_container:
                cure = f"mount this folder in the container, and {cure}"
            place = f"from {self.folder}, where the job finds them"
            yield f"{self.name} imports {self._names()} {place}: {cure}"
        if self.folder and any(_is_file(node) for node in nodes_of(self.text)):
            place = "in the job that is the run folder, with a copy of this file alone"
            yield f"{self.name} looks beside itself (__file__): {place}: give whole paths"

    def _names(self) -> str:
        """The files and folders that lie in its folder, and have what it imports."""
        parts = [file.relative_to(self.folder).parts for file in self.beside]
        names = dict.fromkeys(f"{name}/" if rest else name for name, *rest in parts)
        return ", ".join(names)


def _is_file(node: ast.AST) -> bool:
    """Whether it is the name `__file__`, by which a script finds itself."""
    return isinstance(node, ast.Name) and node.id == "__file__"
