"""Write what the front pages show of the notebooks and the records: tables, the map, and the headline figure."""

import json
import re
from functools import cache
from textwrap import fill

import matplotlib.pyplot as plt
import nbformat
from matplotlib.ticker import FixedLocator, NullLocator

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, pieces
from ddp_helpers.draw.labels import at_the_right, caption, finding
from ddp_helpers.draw.style import BLUE, GREY, ORANGE, WIDTH
from ddp_helpers.records import runs, scaling

README = ROOT / "README.md"
NOTEBOOKS = {path.stem[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))}
TRACKS, RESULTS = ROOT / "docs" / "scripts.md", ROOT / "notebooks" / "results"
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


def front(text: str) -> str:
    """README's text with a row for each notebook, in order, and the finding of its figure; what one needs stays."""
    needs = dict(MAP.findall(text))
    rows = "\n".join(map_row(number, needs.get(number, "")) for number in NOTEBOOKS)
    first, *_, last = MAP.finditer(text)
    text = text[: first.start()] + rows + text[last.end() :]
    return re.sub(r"!\[.*\]\(docs/headline.png\)", f"![{headline().alt}](docs/headline.png)", text)


def tracks(text: str) -> str:
    """The text of docs/scripts.md with the minutes of its tracks counted anew."""
    return TRACK.sub(track_row, text)


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


@cache  # its finding is also README's text
def headline() -> Picture:
    """Draw how many times as fast several processes train as one: published on GPUs, and recorded on two CPU cores."""
    published = json.loads((RESULTS / "published.json").read_text())["tables"][0]
    rows = scaling.speedup(scaling.per_run(runs.table(RESULTS / "two_cpu_cores")))
    ours = rows[(rows["scaling"] == "strong") & (rows["cpus_per_task"] == 1)]
    gpus, times = published["ranks"], [published["seconds"][0] / seconds for seconds in published["seconds"]]
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    ax.plot(gpus, times, "o-", color=BLUE, linewidth=2.5)
    ax.plot(ours["world_size"], ours["speedup"], "o-", color=ORANGE, linewidth=2.5)
    ax.plot([1, gpus[-1]], [1, gpus[-1]], ":", color=GREY)
    ax.set(xscale="log", yscale="log", xlabel="processes, each with a GPU or a CPU core", ylabel="times as fast as one")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator([2**power for power in range(6)]))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    best, last = ours.loc[ours["speedup"].idxmax()], ours.iloc[-1]
    here = f"here, on two CPU cores: {last['world_size']} processes, {last['speedup']:.1f}, since they share the cores"
    labels = [(gpus[-1], times[-1], f"published: {times[-1]:.0f}", BLUE), (gpus[-1], gpus[-1], "ideal", GREY)]
    at_the_right(ax, [*labels, (last["world_size"], last["speedup"], here, ORANGE)], gap=0.08)
    title = f"{gpus[-1]} GPUs trained {times[-1]:.0f} times as fast as one; two CPU cores, {best['speedup']:.1f} times"
    finding(figure, title)
    caption(figure, f"blue: {published['name']}, {published['author']}", "orange: recorded by this course, on MNIST")
    return described(figure, title)


if __name__ == "__main__":
    README.write_text(text := front(README.read_text()))
    TRACKS.write_text(tracks(TRACKS.read_text()))
    headline().save(PICTURE)
    course(text).save(COURSE)
    print(
        f"wrote {PICTURE.relative_to(ROOT)}, {COURSE.relative_to(ROOT)}, and the tables of README.md and {TRACKS.name}"
    )
