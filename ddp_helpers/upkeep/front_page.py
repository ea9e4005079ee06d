"""Write README's map of the course from the notebooks.

`make notebooks` runs it, in one process.
"""

import re
from functools import cache
from textwrap import fill
from typing import NamedTuple

import nbformat

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import (
    Picture,
    arrow,
    box,
    canvas,
    described,
    equal_parts,
    write_text,
)
from ddp_helpers.draw.style import BLUE, ORANGE
from ddp_helpers.upkeep.course import CORE

_README, _MAP = ROOT / "README.md", ROOT / "docs" / "course.png"
# By number: 01, 02, … are the chain; 10b, a number with a letter, is an appendix to notebook 10.
NOTEBOOKS = {
    path.stem.partition("_")[0]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
}
# A notebook's row in the map: its number, and what it needs.
_MAP_ROW = re.compile(r"^\| \[(\d\d[a-z]?) .*?\| ([^|]*) \|$", re.M)


@cache
def _opening(number: str) -> str:
    """Return the first cell of a notebook: its title, its question, its time."""
    return nbformat.read(NOTEBOOKS[number], as_version=4).cells[0].source


def _part_of_opening(number: str, pattern: str) -> str:
    """Return what the group of a pattern matches in a notebook's first cell.

    Raises ValueError, which names the notebook, if the cell has no such part.
    """
    part = re.search(pattern, _opening(number), re.M)
    if not part:
        raise ValueError(f"{NOTEBOOKS[number].name}: its first cell has nothing like {pattern}")
    return part[1]


def _title(number: str) -> str:
    """Return the title of a notebook."""
    return _part_of_opening(number, r"^# (.+)$")


class Minutes(NamedTuple):
    """The two numbers of a notebook's Time line."""

    reading: int  # and running its cells
    exercises: int


def minutes(number: str) -> Minutes:
    """Read the minutes in a notebook's Time line: reading and running, exercises."""
    form = r"\*\*Time\*\* (\d+ minutes of reading and running, \d+ of exercises)"
    return Minutes(*(int(count) for count in re.findall(r"\d+", _part_of_opening(number, form))))


def _map_row(number: str, needs: str) -> str:
    """Return the row of a notebook in the map of the course."""
    question = _part_of_opening(number, r"^\*(\w.+)\*$")
    link = f"[{number} {_title(number)}](notebooks/{NOTEBOOKS[number].name})"
    reading, exercises = minutes(number)
    return f"| {link} | {question} | {reading} | {exercises} | {needs} |"


def front_page_text(text: str) -> str:
    """Return README's text with a row for each notebook, in order.

    The column of what a notebook needs stays unchanged.
    """
    needs = dict(_MAP_ROW.findall(text))
    rows = "\n".join(_map_row(number, needs.get(number, "")) for number in NOTEBOOKS)
    first, *_, last = _MAP_ROW.finditer(text)
    return text[: first.start()] + rows + text[last.end() :]


def _needed(needs: str) -> list[str]:
    """List the numbers of the notebooks in a row's last column: "05 to 07" are three."""
    ranges = re.findall(r"(\d\d)(?: to (\d\d))?", needs)
    numbers = []
    for first, last in ranges:
        numbers += [n for n in NOTEBOOKS if n.isdigit() and first <= n <= (last or first)]
    return numbers


class _Place(NamedTuple):
    """The place of a notebook in the map."""

    column: int
    row: int


def _places(needs: dict[str, list[str]]) -> dict[str, _Place]:
    """Place each notebook to the right of all that it needs: the core above, electives below.

    Electives of a column are in the order of the rows from which they branch off, so that no two
    arrows cross.
    """
    columns: dict[str, int] = {}
    for number in NOTEBOOKS:
        columns[number] = max((columns[need] + 1 for need in needs[number]), default=0)
    places = {number: _Place(columns[number], 0) for number in CORE}
    for column in range(max(columns.values()) + 1):
        electives = [n for n in NOTEBOOKS if n not in CORE and columns[n] == column]

        def parent_row(number: str, left: int = column - 1) -> int:
            rows = (places[need].row for need in needs[number] if columns[need] == left)
            return max(rows, default=0)  # a new notebook, whose last cell is still empty

        for row, number in enumerate(sorted(electives, key=parent_row), 1):
            places[number] = _Place(column, row)
    return places


_FIRST_TOP, _ROW_HEIGHT, _BOX_HEIGHT = 0.6, 1.15, 0.95  # inches


def course_map(readme: str) -> Picture:
    """Draw README's rows as a map, with arrows to each notebook from those just left of it."""
    needs = {number: _needed(cell) for number, cell in _MAP_ROW.findall(readme)}
    places = _places(needs)
    columns = 1 + max(place.column for place in places.values())
    rows = 1 + max(place.row for place in places.values())
    title = (
        f"{len(CORE)} notebooks lead from one GPU to a cluster; take of the others what you need"
    )
    ax = canvas(_FIRST_TOP + _ROW_HEIGHT * rows, title)
    across = equal_parts(0.1, 9.4, columns, gap=0.16)
    tops = {number: _FIRST_TOP + _ROW_HEIGHT * place.row for number, place in places.items()}
    for number, (column, _) in places.items():
        (left, width), top = across[column], tops[number]
        reading, exercises = minutes(number)
        label = f"{number}\n{fill(_title(number), 11)}\n{reading} + {exercises}"
        colour = BLUE if number in CORE else ORANGE
        box(ax, (left, top), (width, _BOX_HEIGHT), label, colour, size=8.5)
        for need in needs[number]:
            if places[need].column == column - 1:
                start = (sum(across[column - 1]), tops[need] + _BOX_HEIGHT / 2)
                arrow(ax, start, (left, top + _BOX_HEIGHT / 2))
    legend = (
        "Blue: the core.",
        "Orange: electives, to the right",
        "of what they need.",
        "In a box: minutes to read and run,",
        "+ minutes of exercises.",
    )
    for line, text in enumerate(legend):
        write_text(ax, 0.1, _FIRST_TOP + 1.5 * _ROW_HEIGHT + 0.3 * line, text, size=10.5, ha="left")
    alt = "; ".join(f"{number} needs {', '.join(needs[number])}" for number in needs)
    return described(ax.figure, alt)


if __name__ == "__main__":
    readme = front_page_text(_README.read_text())
    _README.write_text(readme)
    course_map(readme).save(_MAP)
    print(f"wrote {_MAP.relative_to(ROOT)}, and the table of README.md")
