"""Write README's map and headline from the notebooks and notebooks/results.

`make notebooks` runs it, in one process.
"""

import json
import re
from functools import cache
from textwrap import fill
from typing import NamedTuple

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, equal_parts
from ddp_helpers.draw.labels import at_the_right, write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREY, ORANGE, WIDTH
from ddp_helpers.records import runs, scaling

_README = ROOT / "README.md"
_HEADLINE, _MAP = ROOT / "docs" / "headline.png", ROOT / "docs" / "course.png"
_RESULTS = ROOT / "notebooks" / "results"
# By number: 01, 02, … are the chain; 10b, a number with a letter, is an appendix to notebook 10.
NOTEBOOKS = {
    path.stem.partition("_")[0]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
}
# A notebook's row in the map: its number, and what one needs.
_MAP_ROW = re.compile(r"^\| \[(\d\d[a-z]?) .*?\| ([^|]*) \|$", re.M)


@cache
def _opening(number: str) -> str:
    """Return the first cell of a notebook: its title, its question, its time."""
    return nbformat.read(NOTEBOOKS[number], as_version=4).cells[0].source


def _part_of_opening(number: str, pattern: str) -> str:
    """Return what the group of a pattern matches in a notebook's first cell.

    Raises ValueError, which names the notebook, where the cell has no such part.
    """
    part = re.search(pattern, _opening(number), re.M)
    if not part:
        raise ValueError(f"{NOTEBOOKS[number].name}: its first cell has nothing like {pattern}")
    return part[1]


def _title(number: str) -> str:
    """Return the title of a notebook."""
    return _part_of_opening(number, r"^# (.+)$")


def minutes(number: str) -> int:
    """Add up the minutes in a notebook's Time line: reading, and waiting if it says so."""
    time = _part_of_opening(number, r"\*\*Time\*\* ([^.]*)")
    return sum(int(count) for count in re.findall(r"\d+", time))


def _map_row(number: str, needs: str) -> str:
    """Return the row of a notebook in the map of the course."""
    question = _part_of_opening(number, r"^\*(\w.+)\*$")
    link = f"[{number} {_title(number)}](notebooks/{NOTEBOOKS[number].name})"
    return f"| {link} | {question} | {minutes(number)} | {needs} |"


def front_page_text(text: str) -> str:
    """Return README's text with a row for each notebook, in order, and the headline's finding.

    What one needs for a notebook stays as it is there.
    """
    needs = dict(_MAP_ROW.findall(text))
    rows = "\n".join(_map_row(number, needs.get(number, "")) for number in NOTEBOOKS)
    first, *_, last = _MAP_ROW.finditer(text)
    text = text[: first.start()] + rows + text[last.end() :]
    image = f"![{headline().alt}](docs/headline.png)"
    return re.sub(r"!\[.*\]\(docs/headline.png\)", image, text)


def _needed(needs: str) -> list[str]:
    """List the numbers of the notebooks in a row's last column: "05 to 07" are three."""
    ranges = re.findall(r"(\d\d)(?: to (\d\d))?", needs)
    numbers = []
    for first, last in ranges:
        numbers += [number for number in NOTEBOOKS if first <= number <= (last or first)]
    return numbers


class _Place(NamedTuple):
    """The place of a notebook in the map."""

    column: int
    row: int


def _places(needs: dict[str, list[str]]) -> dict[str, _Place]:
    """Place each notebook to the right of all that it needs, below those of the same column."""
    places: dict[str, _Place] = {}
    for number in NOTEBOOKS:
        column = max((places[need].column + 1 for need in needs[number]), default=0)
        row = sum(place.column == column for place in places.values())
        places[number] = _Place(column, row)
    return places


_FIRST_TOP, _ROW_HEIGHT, _BOX_HEIGHT = 0.6, 1.15, 0.95  # inches


def course_map(text: str) -> Picture:
    """Draw README's rows as a map, with arrows to each notebook from those just left of it."""
    needs = {number: _needed(cell) for number, cell in _MAP_ROW.findall(text)}
    places = _places(needs)
    columns = 1 + max(place.column for place in places.values())
    rows = 1 + max(place.row for place in places.values())
    branches = len(places) - columns
    title = f"{columns} notebooks lead from one GPU to a cluster; {branches} branch off"
    ax = canvas(_FIRST_TOP + _ROW_HEIGHT * rows, title)
    across = equal_parts(0.1, 9.4, columns, gap=0.16)
    tops = {number: _FIRST_TOP + _ROW_HEIGHT * place.row for number, place in places.items()}
    for number, (column, row) in places.items():
        (left, width), top = across[column], tops[number]
        label = f"{number}\n{fill(_title(number), 11)}\n{minutes(number)} min"
        colour = ORANGE if row else BLUE
        box(ax, (left, top), (width, _BOX_HEIGHT), label, colour, size=8.5)
        for need in needs[number]:
            if places[need].column == column - 1:
                start = (sum(across[column - 1]), tops[need] + _BOX_HEIGHT / 2)
                arrow(ax, start, (left, top + _BOX_HEIGHT / 2))
    alt = "; ".join(f"{number} needs {', '.join(needs[number])}" for number in needs)
    return described(ax.figure, alt)


@cache  # its finding is also README's text
def headline() -> Picture:
    """Draw how many times as fast several processes train as one.

    Published on GPUs, and recorded on two CPU cores.
    """
    published = json.loads((_RESULTS / "published.json").read_text())["tables"][0]
    gpus, seconds = published["ranks"], published["seconds"]
    speedups = [seconds[0] / number for number in seconds]
    recorded = _recorded_speedups()
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    ax.plot(gpus, speedups, "o-", color=BLUE, linewidth=2.5)
    ax.plot(recorded["world_size"], recorded["speedup"], "o-", color=ORANGE, linewidth=2.5)
    ax.plot([1, gpus[-1]], [1, gpus[-1]], ":", color=GREY)
    _scale_axes(ax)
    last = recorded.iloc[-1]
    cores = f"here, on two CPU cores: {last['world_size']} processes, {last['speedup']:.1f}"
    labels = [
        (gpus[-1], speedups[-1], f"published: {speedups[-1]:.0f}", BLUE),
        (gpus[-1], gpus[-1], "ideal", GREY),
        (last["world_size"], last["speedup"], f"{cores}, since they share the cores", ORANGE),
    ]
    at_the_right(ax, labels, gap=0.08)
    best = recorded["speedup"].max()
    title = f"{gpus[-1]} GPUs trained {speedups[-1]:.0f} times as fast as one"
    title += f"; two CPU cores, {best:.1f} times"
    write_title(figure, title)
    source = f"blue: {published['name']}, {published['author']}"
    write_caption(figure, source, "orange: recorded by this course, on MNIST")
    return described(figure, title)


def _recorded_speedups() -> pd.DataFrame:
    """Return the rows of the recorded study with the same global batch, on one CPU a rank."""
    table = runs.table(_RESULTS / "two_cpu_cores")
    rows = scaling.speedup(scaling.per_run(table))
    return rows[(rows["scaling"] == "strong") & (rows["cpus_per_task"] == 1)]


def _scale_axes(ax: Axes) -> None:
    """Give both axes a logarithmic scale, with ticks at the powers of two up to 32."""
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="processes, each with a GPU or a CPU core", ylabel="times as fast as one")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator([2**power for power in range(6)]))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())


if __name__ == "__main__":
    readme = front_page_text(_README.read_text())
    _README.write_text(readme)
    headline().save(_HEADLINE)
    course_map(readme).save(_MAP)
    pictures = f"{_HEADLINE.relative_to(ROOT)}, {_MAP.relative_to(ROOT)}"
    print(f"wrote {pictures}, and the table of README.md")
