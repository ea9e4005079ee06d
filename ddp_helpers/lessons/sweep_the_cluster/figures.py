"""The figures of notebook 08: strong and weak scaling as bricks, speeds, waiting and running.

The notebook calls them, in its own process; `speeds` draws what it computed.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd

from ddp_helpers.draw.drawing import Picture, box, canvas, described, write_left, write_text
from ddp_helpers.draw.labels import captioned, stacked_bars
from ddp_helpers.draw.style import BLUE, GREY, ORANGE, rank_colour
from ddp_helpers.records.scaling import counted, data_and_machine

# ---- strong and weak, as bricks


def bricks(images: int, batch: int, sizes: Sequence[int]) -> Picture:
    """Draw the steps of an epoch for each number of ranks, a brick a step and rank.

    batch: cut up among the ranks on the left (strong), of each rank on the right (weak).
    """
    steps, most = images // batch, max(sizes)
    title = f"Strong cuts a batch up: always {steps} steps. "
    title += f"Weak adds batches: {math.ceil(steps / most)} steps on {most} ranks"
    heights = [max(0.55, 0.3 * size) for size in sizes]
    ax = canvas(1.15 + sum(heights) + 0.25 * len(sizes), title)
    write_text(ax, 1.2, 0.75, f"strong: {batch} images a step", ha="left", weight="bold")
    write_text(ax, 5.5, 0.75, f"weak: {batch} images a step and rank", ha="left", weight="bold")
    top = 1.0
    for size, height in zip(sizes, heights, strict=True):
        middle = top + height / 2
        write_left(ax, middle, counted(size, "rank"))
        for left, columns, brick in ((1.2, steps, 0.3 / size), (5.5, math.ceil(steps / size), 0.3)):
            for step, rank in itertools.product(range(columns), range(size)):
                corner = left + step * 3.65 / steps, middle + (rank - size / 2) * brick
                extent = 3.65 / steps - 0.03, brick - 0.02
                box(ax, corner, extent, colour=rank_colour(rank), fill=0.55)
        top += height + 0.25
    alt = f"Bricks, one a step and rank. {title}. The area is the same everywhere."
    return described(ax.figure, alt)


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
        # Ranks stand evenly apart, whatever their numbers.
        places = [counts.index(count) for count in rates[kind].index.get_level_values("world_size")]
        medians = rates[kind].groupby("world_size").median()
        ax.plot(sorted(set(places)), medians, color=colour, linewidth=1.5)
        ax.plot(places, rates[kind], "o", color=colour, markersize=8)
        ax.set_xticks(range(len(counts)), [str(count) for count in counts])
        ax.set_xlim(-0.4, len(counts) - 0.6)
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


# ---- waiting and running


def wait_and_run(times: Mapping[str, tuple[float, float]], source: str) -> Picture:
    """Draw for each size the seconds until its job starts, and those that it runs.

    times: both, by the name of the size; source: where they are from, for the caption.
    """
    frame = pd.DataFrame(times, index=["waits", "runs"]).T
    colours = {"waits": "#C4C4C4", "runs": BLUE}
    figure, ax, (_, runs) = stacked_bars(frame, colours, figsize=(8.5, 0.5 * len(times) + 1.3))
    totals = frame.sum(axis=1)
    ax.bar_label(runs, [f"{total:.0f} s" for total in totals], padding=5)
    ax.margins(x=0.1)
    ax.set_xlabel("seconds from now")
    ax.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2, fontsize=10)
    longest = frame["waits"].idxmax()
    wait, run = frame.loc[longest]
    title = f"{longest}: {wait:.0f} s of waiting for a job that runs {run:.0f} s"
    if wait <= run:  # seconds apart, the others are equal within the noise
        title = f"{totals.idxmin()} has the result first, after {totals.min():.0f} s"
    return captioned(figure, title, source)
