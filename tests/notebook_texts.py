"""What stands in a notebook, for the tests of the exercises."""

import re
from pathlib import Path

import nbformat

MEANT = "bash: line 1: none.sh: No such file or directory\n"  # the one red box: the lesson of a fault in 10b


def cells(path: Path, kind: str) -> list[str]:
    """The sources of a notebook's cells of a kind."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def asked(path: Path) -> list[str]:
    """The exercises that a notebook checks, in order."""
    return re.findall(r"^lessons\.check\((\w+)\)$", "\n".join(cells(path, "code")), re.M)


def files(path: Path) -> dict[str, str]:
    """The files that a notebook's cells write, by name; a cell with --append adds to the one before."""
    written: dict[str, str] = {}
    for cell in cells(path, "code"):
        if file := re.match(r"%%writefile (?:--append )?(?:\S*/)?([\w.]+)\n", cell):
            written[file[1]] = written.get(file[1], "") + cell[file.end() :] + "\n"
    return written
