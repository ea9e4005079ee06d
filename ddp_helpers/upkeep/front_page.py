"""Write what README.md shows of the notebooks: its tables, the map of the course, and the headline figure."""

import base64
import re
from functools import cache
from pathlib import Path
from textwrap import fill

import nbformat

from ddp_helpers import ROOT
from ddp_helpers.notebook.drawing import Picture, arrow, box, canvas, described, pieces
from ddp_helpers.notebook.style import BLUE, ORANGE

README = ROOT / "README.md"
NOTEBOOKS = {path.stem[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))}
NOTEBOOK = ROOT / "notebooks" / "09_plot_the_scaling.ipynb"
HEADING = "## Speed-up and efficiency"
PICTURE, COURSE = ROOT / "docs" / "headline.png", ROOT / "docs" / "course.png"
MAP = re.compile(r"^\| \[(\d\d) .*?\| ([^|]*) \|$", re.M)  # a notebook's row: its number, and what one needs
TRACK = re.compile(r"^(\| [\w ]+ \| )(\d\d[\d, to]*)( \| )\d+( \|.*)$", re.M)  # a track's row, with its notebooks


@cache
def opening(number: str) -> str:
    """The first cell of a notebook: its title, its question, its time."""
    return nbformat.read(NOTEBOOKS[number], as_version=4).cells[0].source


def title(number: str) -> str:
    """The title of a notebook."""
    return re.search(r"^# (.+)$", opening(number), re.M)[1]


def minutes(number: str) -> int:
    """Add up the minutes in a notebook's own Time line: reading, and waiting if it says so."""
    return sum(map(int, re.findall(r"\d+", re.search(r"\*\*Time\*\* ([^.]*)", opening(number))[1])))


def map_row(number: str, needs: str) -> str:
    """The row of a notebook in the map of the course."""
    question = re.search(r"^\*(\w.+)\*$", opening(number), re.M)[1]
    link = f"[{number} {title(number)}](notebooks/{NOTEBOOKS[number].name})"
    return f"| {link} | {question} | {minutes(number)} | {needs} |"


def track_row(row: re.Match) -> str:
    """The row of a track, with the minutes of its notebooks added up."""
    numbers = re.findall(r"\d\d", row[2])
    if " to " in row[2]:
        numbers = [number for number in NOTEBOOKS if numbers[0] <= number <= numbers[1]]
    return f"{row[1]}{row[2]}{row[3]}{sum(map(minutes, numbers))}{row[4]}"


def tables(text: str) -> str:
    """README's text with a row for each notebook, in order, and with its tracks' minutes; what one needs stays."""
    needs = dict(MAP.findall(text))
    rows = "\n".join(map_row(number, needs.get(number, "")) for number in NOTEBOOKS)
    first, *_, last = MAP.finditer(text)
    return TRACK.sub(track_row, text[: first.start()] + rows + text[last.end() :])


def needed(needs: str) -> list[str]:
    """The numbers of the notebooks in a row's last column: "05 to 07" are three."""
    ranges = re.findall(r"(\d\d)(?: to (\d\d))?", needs)
    return [number for first, last in ranges for number in NOTEBOOKS if first <= number <= (last or first)]


def course(text: str) -> Picture:
    """Draw README's rows as a map: each notebook to the right of all that it builds on, arrows from the nearest."""
    needs = {number: needed(row) for number, row in MAP.findall(text)}
    place, taken = {}, {}
    for number in NOTEBOOKS:
        column = max((place[one][0] + 1 for one in needs[number]), default=0)
        place[number] = (column, taken.get(column, 0))
        taken[column] = taken.get(column, 0) + 1
    across = pieces(0.1, 9.4, 1 + max(column for column, _ in place.values()), gap=0.16)
    tops = {number: 0.6 + 1.15 * row for number, (_, row) in place.items()}
    finding = f"{len(taken)} notebooks lead from one GPU to a cluster; {len(place) - len(taken)} branch off"
    ax = canvas(0.6 + 1.15 * max(taken.values()), finding)
    for number, (column, row) in place.items():
        (left, width), top = across[column], tops[number]
        words = f"{number}\n{fill(title(number), 11)}\n{minutes(number)} min"
        box(ax, (left, top), (width, 0.95), words, ORANGE if row else BLUE, size=8.5)
        for one in needs[number]:
            if place[one][0] == column - 1:
                arrow(ax, (sum(across[column - 1]), tops[one] + 0.475), (left, top + 0.475))
    return described(ax.figure, "; ".join(f"{number} needs {', '.join(needs[number])}" for number in needs))


def headline(notebook: Path = NOTEBOOK) -> bytes:
    """The first figure below the heading. Raises ValueError if there is none: the notebook was not executed."""
    below = False
    for cell in nbformat.read(notebook, as_version=4).cells:
        below = below or (cell.cell_type == "markdown" and HEADING in cell.source.splitlines())
        for output in cell.get("outputs", []) if below else []:
            if picture := output.get("data", {}).get("image/png"):
                return base64.b64decode(picture)
    raise ValueError(f"{notebook.name} has no figure below {HEADING!r}: execute it first, with `make notebooks`")


if __name__ == "__main__":
    PICTURE.write_bytes(headline())
    README.write_text(text := tables(README.read_text()))
    course(text).save(COURSE)
    print(f"wrote {PICTURE.relative_to(ROOT)}, {COURSE.relative_to(ROOT)}, and the tables of {README.name}")
