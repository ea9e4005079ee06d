"""Keep the record of `make gpu`, which runs it, with speed.png and overlap.png next to it."""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, ORANGE, WIDTH
from ddp_helpers.rank.launchers import stop
from ddp_helpers.records import runs
from ddp_tools import PlainError

COMMITTED = ROOT / "notebooks" / "results" / "gpu"
_MADE = ROOT / "build" / "gpu"  # where the tests have written them
_RECIPES = ROOT / "notebooks" / "results" / "recipes"
# A rung of notebook 12's ladder: its name in the record, and the recorded run on two CPU cores.
_RUNGS = {
    "plain loader, no workers": ("plain, no workers", "plain-seed1"),
    "plain loader, with workers": ("plain, with workers", ""),
    "mnist_fast, batch 64": ("fast, batch 64", "fast-seed1"),
    "mnist_fast, batch 256": ("fast, batch 256", ""),
    "mnist_fast, batch 1024": ("fast, batch 1024", ""),
}
Record = dict[str, dict[str, Any]]  # `facts` of the machine, and `steps`


def read_record(folder: Path) -> Record:
    """Read record.json."""
    return json.loads((folder / "record.json").read_text())


def machine(record: Record) -> str:
    """Name the machine of a record, for a caption."""
    facts = record["facts"]
    return f"{facts['gpus']} x {facts['names'][0]}, torch {facts['torch']}"


def draw_speed(record: Record) -> Picture:
    """Draw the images per second of the ladder's rungs, next to the values of two CPU cores."""
    rows = record["steps"]["speed"]["seen"]["rows"]
    here, cores = {}, {}
    for rung, (name, recorded) in _RUNGS.items():
        if speeds := rows.get(name, {}).get("images_per_second"):  # none of a script that failed
            here[rung] = max(speeds)
            if recorded:
                epochs = runs.read_run(_RECIPES / recorded).epochs
                cores[rung] = max(epoch["images_per_second"] for epoch in epochs)
    rungs = list(here)
    figure, ax = plt.subplots(figsize=(WIDTH, 2.1 + 0.6 * len(rungs)), layout="constrained")
    sides = (("two CPU cores, recorded", GREY, cores, -18), ("this machine", BLUE, here, 9))
    for label, colour, rates, above in sides:
        places = [rungs.index(rung) for rung in rates]
        ax.plot(list(rates.values()), places, "o", color=colour, markersize=9, label=label)
        for place, speed in zip(places, rates.values(), strict=True):
            point, offset = (speed, place), (0, above)
            ax.annotate(f"{speed:,.0f}", point, offset, textcoords="offset points", ha="center")
    ax.set_yticks(range(len(rungs)), rungs)
    ax.set(xscale="log", xlabel="images per second", ylim=(len(rungs) - 0.4, -0.7))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(x=0.15)
    ax.grid(axis="x", which="major")
    figure.legend(loc="outside right center")
    best, slowest = (choose(here, key=lambda rung: here[rung]) for choose in (max, min))
    times = here[best] / here[slowest]
    title = f"{best}: {times:.1f} times the images per second of {slowest}"
    return captioned(figure, title, f"{machine(record)}; the fastest epoch of each")


def draw_overlap(record: Record) -> Picture:
    """Draw one step with each NCCL class: computing above, all-reduces below."""
    classes = record["steps"]["overlap"]["seen"]["classes"]
    size = WIDTH, 1.7 + 1.3 * len(classes)
    figure, axes = plt.subplots(len(classes), 1, figsize=size, sharex=True, squeeze=False)
    figure.set_layout_engine("constrained")
    for ax, (name, seen) in zip(axes[:, 0], classes.items(), strict=True):
        _draw_step(ax, seen["lanes"])
        milliseconds = seen["milliseconds"]["ddp"]
        ax.set_title(f"{name}, {milliseconds:.1f} ms a step without the profiler", loc="left")
    axes[-1, 0].set_xlabel("time in a recorded step of rank 0 [ms]")
    shares = record["steps"]["overlap"]["seen"]["shares"]
    hidden = ", ".join(f"{share:.0%} ({name})" for name, share in shares.items())
    title = f"All-reduces hidden behind computing, of what can be: {hidden}"
    return captioned(figure, title, machine(record), "a step of six equal layers, with DDP")


def _draw_step(ax: Axes, lanes: dict[str, list]) -> None:
    """Draw the spans of a step in two lanes."""
    for lane, (name, colour) in enumerate((("compute", BLUE), ("all-reduce", ORANGE))):
        bars = [(begin, end - begin) for begin, end in lanes[name]]
        ax.broken_barh(bars, (lane, 0.8), facecolor=colour, linewidth=0)
    ax.set(ylim=(2, -0.2), yticks=(0.4, 1.4), yticklabels=("computes", "all-reduces"))
    ax.tick_params(axis="y", length=0)


def keep(folder: Path) -> Path:
    """Move a record to notebooks/results/gpu, draw its figures there, and return its new folder.

    Raises PlainError for a record of simulated GPUs.
    """
    record = read_record(folder)
    if record["facts"]["simulated"]:
        cure = "make gpu, where a real GPU is, and without ddp-course gpus"
        raise PlainError(f"{folder} is of simulated GPUs, whose times mean nothing: {cure}")
    numbers = (COMMITTED / f"{folder.name.rpartition('-')[0]}-{number}" for number in count(1))
    target = next(path for path in numbers if not path.exists())
    COMMITTED.mkdir(exist_ok=True)
    shutil.move(folder, target)
    for step, draw in {"speed": draw_speed, "overlap": draw_overlap}.items():
        if record["steps"].get(step, {}).get("seen"):
            draw(record).save(target / f"{step}.png")
    return target


if __name__ == "__main__":
    records = [path.parent for path in _MADE.glob("*/record.json")]
    if records:
        try:
            kept = keep(max(records, key=lambda folder: folder.stat().st_mtime))
            print(f"send this folder to the course, or commit it: {kept}")
        except PlainError as error:
            stop(str(error))
