"""Write README's map and headline from the notebooks and notebooks/results.

`make notebooks` runs it, in one process. It also counts the minutes: in each notebook's Time line,
of the tracks in docs/scripts.md, and in the plans of docs/trainers.md.
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

_README, _TRACKS = ROOT / "README.md", ROOT / "docs" / "scripts.md"
_PLANS = ROOT / "docs" / "trainers.md"
_HEADLINE, _MAP = ROOT / "docs" / "headline.png", ROOT / "docs" / "course.png"
_RESULTS = ROOT / "notebooks" / "results"
# By number: 01, 02, … are the chain; 10b, a number with a letter, is an appendix to notebook 10.
NOTEBOOKS = {
    path.stem.partition("_")[0]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
}
PROJECTS = "17"  # its exercises are projects: how long they take, its cells do not say
# A notebook's row in the map: its number, and what one needs.
_MAP_ROW = re.compile(r"^\| \[(\d\d[a-z]?) .*?\| ([^|]*) \|$", re.M)
# A track's row, with its notebooks.
_TRACK_ROW = re.compile(r"^(\| [\w ]+ \| )(\d\d[\d, to]*)( \| )\d+( \|.*)$", re.M)

# A notebook's row in a plan for a day: so many minutes of those that it takes.
_PLAN_ROW = re.compile(r"^(\|.*\| \[(\d\d) .*\| \d+ of )\d+( \|)$", re.M)


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


def honest_minutes(number: str) -> float:
    """Compute how long a newcomer needs for a notebook as it stands with its outputs.

    The rates were fitted to readers with a clock: 150 words of prose a minute, 500 characters of
    code, 1,500 of printed output; 0.7 minutes a figure, 0.5 a Predict, 5 an exercise.
    """
    total = 0.0
    for cell in nbformat.read(NOTEBOOKS[number], as_version=4).cells:
        if cell.cell_type == "markdown":
            total += len(cell.source.split()) / 150 + 0.5 * ("**Predict" in cell.source)
            continue
        total += len(cell.source) / 500 + 5 * ("raise NotImplementedError" in cell.source)
        for output in cell.outputs:
            data = output.get("data", {"text/plain": output.get("text", "")})
            total += 0.7 * ("<img " in data.get("text/html", ""))
            total += len(_shown_text(data)) / 1500
    return total


def _shown_text(data: dict[str, str]) -> str:
    """Return the text that an output shows: of a picture none, of what is folded its summary."""
    html = data.get("text/html", "")
    if "<img " in html:
        return ""
    if "<details" not in html:
        return data.get("text/plain", "")
    folded = re.sub(r"(?s)<details.*?(<summary.*?</summary>).*?</details>", r"\1", html)
    return re.sub(r"(?s)<style.*?</style>|<[^>]+>", "", folded)


def _promise_minutes(number: str) -> None:
    """Write a notebook's honest minutes, in fives, as the first number of its Time line.

    One whose exercises are projects keeps its own.
    """
    if number == PROJECTS:
        return
    promise = 5 * round(honest_minutes(number) / 5)
    notebook = nbformat.read(NOTEBOOKS[number], as_version=4)
    opening = notebook.cells[0]
    opening.source = re.sub(r"(\*\*Time\*\* )\d+", rf"\g<1>{promise}", opening.source)
    nbformat.write(notebook, NOTEBOOKS[number])
    _opening.cache_clear()


def _map_row(number: str, needs: str) -> str:
    """Return the row of a notebook in the map of the course."""
    question = _part_of_opening(number, r"^\*(\w.+)\*$")
    link = f"[{number} {_title(number)}](notebooks/{NOTEBOOKS[number].name})"
    return f"| {link} | {question} | {minutes(number)} | {needs} |"


def _track_row(row: re.Match[str]) -> str:
    """Return the row of a track, with the minutes of its notebooks added up."""
    numbers = re.findall(r"\d\d", row[2])
    if " to " in row[2]:
        chain = filter(str.isdigit, NOTEBOOKS)  # appendices are to look things up
        numbers = [number for number in chain if numbers[0] <= number <= numbers[1]]
    total = sum(minutes(number) for number in numbers)
    return f"{row[1]}{row[2]}{row[3]}{total}{row[4]}"


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


def tracks_text(text: str) -> str:
    """Return the text of docs/scripts.md with the minutes of its tracks counted anew."""
    return _TRACK_ROW.sub(_track_row, text)


def plans_text(text: str) -> str:
    """Return the text of docs/trainers.md with the minutes that each notebook takes as a whole."""
    return _PLAN_ROW.sub(lambda row: f"{row[1]}{minutes(row[2])}{row[3]}", text)


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
    for name in NOTEBOOKS:
        _promise_minutes(name)
    readme = front_page_text(_README.read_text())
    _README.write_text(readme)
    _TRACKS.write_text(tracks_text(_TRACKS.read_text()))
    _PLANS.write_text(plans_text(_PLANS.read_text()))
    headline().save(_HEADLINE)
    course_map(readme).save(_MAP)
    pictures = f"{_HEADLINE.relative_to(ROOT)}, {_MAP.relative_to(ROOT)}"
    print(f"wrote {pictures}, and the tables of README.md, {_TRACKS.name} and {_PLANS.name}")
