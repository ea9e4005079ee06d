"""Figures of notebook 08: strong and weak scaling as bricks, speeds, waiting and running."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd

from ddp_helpers.draw import drawing
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, LEFT, ORANGE, RIGHT, TIMES, rank_colour
from ddp_helpers.records.scaling import many, where


def bricks(images: int, batch: int, sizes: Sequence[int]) -> Picture:
    """Draw the steps of an epoch for each number of ranks: a batch of all ranks, cut up (strong), or of each (weak)."""
    steps, unit = images // batch, 0.3
    fewest = -(-steps // max(sizes))
    title = f"Strong cuts a batch up: always {steps} steps. Weak adds batches: {fewest} steps on {max(sizes)} ranks"
    ax = drawing.canvas(1.15 + sum(max(0.55, size * unit) + 0.25 for size in sizes), title)
    columns, width = (LEFT + 1.1, (LEFT + RIGHT) / 2 + 0.75), (RIGHT - LEFT) / 2 - 1.0
    for left, name in zip(columns, ("strong: {} images a step", "weak: {} images a step and rank"), strict=True):
        drawing.write(ax, left, 0.75, name.format(batch), ha="left", weight="bold")
    top = 1.0
    for size in sizes:
        height = max(0.55, size * unit)
        drawing.write(ax, LEFT, top + height / 2, many(size, "rank"), ha="left")
        for left, taken, tall in ((columns[0], steps, unit / size), (columns[1], -(-steps // size), unit)):
            for step in range(taken):
                for rank in range(size):
                    corner = (left + step * width / steps, top + (height - size * tall) / 2 + rank * tall)
                    drawing.box(ax, corner, (width / steps - 0.03, tall - 0.02), "", rank_colour(rank), fill=0.55)
        top += height + 0.25
    return drawing.described(ax.figure, f"Bricks, one a step and rank. {title}. The area is the same everywhere.")


def speeds(jobs: pd.DataFrame) -> Picture:
    """Draw images per second of each run, a row a setting: strong blue, weak orange; jobs: from scaling.per_run."""
    _, alone = next(iter(jobs.groupby(["world_size", "cpus_per_task"])["images_per_second"]))  # the least of both
    rows = []
    for (kind, ranks, cpus), rates in jobs.groupby(["scaling", "world_size", "cpus_per_task"])["images_per_second"]:
        rows.append((rates.median(), f"{kind}, {many(int(ranks), 'rank')} {TIMES} {many(int(cpus), 'CPU')}", rates))
    rows.sort(key=lambda row: row[0])
    figure, ax = plt.subplots(figsize=(8.5, 0.45 * len(rows) + 1.3), layout="constrained")
    ax.axvspan(alone.min(), alone.max(), color=GREY, alpha=0.2, linewidth=0)
    for place, (_, name, rates) in enumerate(rows):
        ax.plot(rates, [place] * len(rates), "o-", color=BLUE if name.startswith("strong") else ORANGE, markersize=8)
    ax.set_yticks(range(len(rows)), [name for _, name, _ in rows])
    ax.set_xlim(left=0)
    ax.set_xlabel("images per second; grey: equal runs of one rank, so a smaller difference means nothing")
    best, fastest, _ = [row for row in rows if row[1].startswith("strong")][-1]
    verb, times = "is" if " 1 rank " in fastest else "are", f"{best / alone.median():.1f} {TIMES}"
    return captioned(figure, f"{fastest.replace('strong,', 'Strong:')} {verb} {times} as fast as one rank", where(jobs))


def wait_and_run(times: Mapping[str, tuple[float, float]], source: str) -> Picture:
    """Draw for each size the seconds until its job starts and the seconds that it runs, one bar behind the other."""
    figure, ax = plt.subplots(figsize=(8.5, 0.5 * len(times) + 1.3), layout="constrained")
    names, (waits, took) = list(times), zip(*times.values(), strict=True)
    ax.barh(names, waits, color="#C4C4C4", label="waits")
    bars = ax.barh(names, took, left=waits, color=BLUE, label="runs")
    ax.bar_label(bars, [f"{sum(both):.0f} s" for both in times.values()], padding=5)
    ax.margins(x=0.1)
    ax.invert_yaxis()
    ax.set_xlabel("seconds from now")
    ax.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2, fontsize=10)
    first = min(times, key=lambda name: sum(times[name]))
    return captioned(figure, f"{first} has the result first, after {sum(times[first]):.0f} s", source)
