"""The figures of notebook 08: strong and weak scaling as bricks, speeds, waiting and running.

The notebook calls them, in its own process; `speeds` draws what it computed.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, box, canvas, described, write_text
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, LEFT, ORANGE, RIGHT, rank_colour
from ddp_helpers.records.scaling import counted, data_and_machine

# ---- strong and weak, as bricks

_BRICK_HEIGHT = 0.3  # inches, of a batch
_COLUMN_WIDTH = (RIGHT - LEFT) / 2 - 1.0
_STRONG_LEFT, _WEAK_LEFT = LEFT + 1.1, (LEFT + RIGHT) / 2 + 0.75


def bricks(images: int, batch: int, sizes: Sequence[int]) -> Picture:
    """Draw the steps of an epoch for each number of ranks, a brick a step and rank.

    batch: cut up among the ranks on the left (strong), of each rank on the right (weak).
    """
    steps = images // batch
    fewest = _rounded_up(steps, max(sizes))
    title = f"Strong cuts a batch up: always {steps} steps. "
    title += f"Weak adds batches: {fewest} steps on {max(sizes)} ranks"
    heights = [max(0.55, size * _BRICK_HEIGHT) for size in sizes]
    ax = canvas(1.15 + sum(height + 0.25 for height in heights), title)
    strong, weak = f"strong: {batch} images a step", f"weak: {batch} images a step and rank"
    write_text(ax, _STRONG_LEFT, 0.75, strong, ha="left", weight="bold")
    write_text(ax, _WEAK_LEFT, 0.75, weak, ha="left", weight="bold")
    top = 1.0
    pitch = _COLUMN_WIDTH / steps
    for size, height in zip(sizes, heights, strict=True):
        middle = top + height / 2
        write_text(ax, LEFT, middle, counted(size, "rank"), ha="left")
        _draw_bricks(ax, _STRONG_LEFT, middle, pitch, steps, size, _BRICK_HEIGHT / size)
        weak_steps = _rounded_up(steps, size)
        _draw_bricks(ax, _WEAK_LEFT, middle, pitch, weak_steps, size, _BRICK_HEIGHT)
        top += height + 0.25
    alt = f"Bricks, one a step and rank. {title}. The area is the same everywhere."
    return described(ax.figure, alt)


def _rounded_up(dividend: int, divisor: int) -> int:
    """Divide two positive numbers, rounded up."""
    return -(-dividend // divisor)


def _draw_bricks(
    ax: Axes,
    left: float,
    middle: float,
    pitch: float,
    steps: int,
    ranks: int,
    height: float,
) -> None:
    """Draw the bricks of an epoch: a column for each step, in it a brick for each rank.

    pitch: inches from step to step; height: of a brick.
    """
    for step in range(steps):
        for rank in range(ranks):
            corner = left + step * pitch, middle - ranks * height / 2 + rank * height
            extent = pitch - 0.03, height - 0.02
            box(ax, corner, extent, "", rank_colour(rank), fill=0.55)


# ---- speeds


def speeds(rates: pd.Series, base: float, table: pd.DataFrame) -> Picture:
    """Draw images per second of each run by its ranks: strong on the left, weak on the right.

    rates: a number a run, by scaling, world_size and run. base: that of the fewest ranks, by which
    the title divides; their runs, of both kinds, span the grey band. table: from runs.table.
    """
    ranks = rates.index.get_level_values("world_size")
    counts = sorted(set(ranks))
    fewest = rates[ranks == counts[0]]
    figure, panels = plt.subplots(1, 2, figsize=(8.5, 3.6), sharey=True, layout="constrained")
    for ax, kind, colour in zip(panels, ("strong", "weak"), (BLUE, ORANGE), strict=True):
        _draw_panel(ax, rates[kind], counts, colour)
        ax.axhspan(fewest.min(), fewest.max(), color=GREY, alpha=0.2, linewidth=0)
        ax.set_title("same global batch" if kind == "strong" else "same batch per rank")
        ax.set_xlabel(f"{kind}: ranks")
    panels[0].set_ylabel("images per second")
    panels[0].set_ylim(0, 1.08 * rates.max())
    medians = rates["strong"].groupby("world_size").median()
    smallest = counted(counts[0], "rank")
    gains = [f"{medians[count] / base:.2f} on {count}" for count in counts[1:] or counts]
    title = f"Strong, times as fast as {smallest}: {', '.join(gains)} ranks"
    band = f"dots: runs; grey: from the slowest to the fastest run of {smallest}"
    return captioned(figure, title, band, data_and_machine(table))


def _draw_panel(ax: Axes, rates: pd.Series, counts: Sequence[int], colour: str) -> None:
    """Draw the runs of one kind as dots, and their medians as a line, ranks evenly apart."""
    places = {count: place for place, count in enumerate(counts)}
    medians = rates.groupby("world_size").median()
    ax.plot([places[count] for count in medians.index], medians, color=colour, linewidth=1.5)
    dots = [places[count] for count in rates.index.get_level_values("world_size")]
    ax.plot(dots, rates, "o", color=colour, markersize=8)
    ax.set_xticks(range(len(counts)), [str(count) for count in counts])
    ax.set_xlim(-0.4, len(counts) - 0.6)


# ---- waiting and running


def wait_and_run(times: Mapping[str, tuple[float, float]], source: str) -> Picture:
    """Draw for each size the seconds until its job starts, and those that it runs.

    times: both, by the name of the size; source: where they are from, for the caption.
    """
    size = 8.5, 0.5 * len(times) + 1.3
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    names = list(times)
    waits = [wait for wait, _ in times.values()]
    runs = [run for _, run in times.values()]
    totals = [wait + run for wait, run in times.values()]
    ax.barh(names, waits, color="#C4C4C4", label="waits")
    bars = ax.barh(names, runs, left=waits, color=BLUE, label="runs")
    ax.bar_label(bars, [f"{total:.0f} s" for total in totals], padding=5)
    ax.margins(x=0.1)
    ax.invert_yaxis()
    ax.set_xlabel("seconds from now")
    ax.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2, fontsize=10)
    longest = waits.index(max(waits))
    if waits[longest] > runs[longest]:  # seconds apart, the others are equal within the noise
        title = f"{names[longest]}: {waits[longest]:.0f} s of waiting"
        title += f" for a job that runs {runs[longest]:.0f} s"
    else:
        first = min(totals)
        title = f"{names[totals.index(first)]} has the result first, after {first:.0f} s"
    return captioned(figure, title, source)
