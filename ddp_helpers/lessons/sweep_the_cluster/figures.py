"""Figures of notebook 08: strong and weak scaling as bricks, the speed of each run, and the wait before it."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd

from ddp_helpers.notebook.drawing import (
    BLUE,
    GREY,
    INK,
    LEFT,
    ORANGE,
    RIGHT,
    SMALL,
    TIMES,
    Picture,
    box,
    canvas,
    described,
    rank_colour,
    write,
)
from ddp_helpers.notebook.labels import caption, finding
from ddp_helpers.notebook.scaling import many, where


def bricks(images: int, batch: int, sizes: Sequence[int]) -> Picture:
    """Draw the steps of an epoch for each number of ranks: a batch of all ranks, cut up (strong), or of each (weak)."""
    steps, unit = images // batch, 0.3
    fewest = -(-steps // max(sizes))
    title = f"Strong cuts a batch up: always {steps} steps. Weak adds batches: {fewest} steps on {max(sizes)} ranks"
    ax = canvas(1.15 + sum(max(0.55, size * unit) + 0.25 for size in sizes), title)
    columns, width = (LEFT + 1.1, (LEFT + RIGHT) / 2 + 0.75), (RIGHT - LEFT) / 2 - 1.0
    for left, name in zip(
        columns, (f"strong: {batch} images a step", f"weak: {batch} images a step and rank"), strict=True
    ):
        write(ax, left, 0.75, name, ha="left", weight="bold")
    top = 1.0
    for size in sizes:
        height = max(0.55, size * unit)
        write(ax, LEFT, top + height / 2, many(size, "rank"), ha="left")
        for left, taken, tall in ((columns[0], steps, unit / size), (columns[1], -(-steps // size), unit)):
            for step in range(taken):
                for rank in range(size):
                    corner = (left + step * width / steps, top + (height - size * tall) / 2 + rank * tall)
                    box(ax, corner, (width / steps - 0.03, tall - 0.02), "", rank_colour(rank), fill=0.55)
        top += height + 0.25
    alt = f"Bricks, one a step and rank, colour by rank. {title}. The area is the same everywhere: all {images} images."
    return described(ax.figure, alt)


def speeds(runs: pd.DataFrame) -> Picture:
    """Draw images per second of each run, a row a setting: strong blue, weak orange; runs: from scaling.per_run."""
    keys = ["scaling", "world_size", "cpus_per_task"]
    groups = sorted(runs.groupby(keys)["images_per_second"], key=lambda group: group[1].median())
    figure, ax = plt.subplots(figsize=(8.5, 0.45 * len(groups) + 1.3), layout="constrained")
    alone = runs[(runs["scaling"] == "strong") & (runs["world_size"] == runs["world_size"].min())]
    base = alone[alone["cpus_per_task"] == alone["cpus_per_task"].min()]["images_per_second"]
    ax.axvspan(base.min(), base.max(), color=GREY, alpha=0.2, linewidth=0)
    for row, ((scaling, *_), rates) in enumerate(groups):
        ax.plot(rates, [row] * len(rates), "o-", color=BLUE if scaling == "strong" else ORANGE, markersize=8)
    names = [
        f"{kind}, {many(int(ranks), 'rank')} {TIMES} {many(int(cpus), 'CPU')}" for (kind, ranks, cpus), _ in groups
    ]
    ax.set_yticks(range(len(groups)), names)
    ax.set_xlim(left=0)
    ax.set_xlabel("images per second; grey: equal runs of one rank, so a smaller difference means nothing")
    strong = [(key, rates.median()) for key, rates in groups if key[0] == "strong"]
    (_, ranks, cpus), best = max(strong, key=lambda one: one[1])
    fastest = f"{many(int(ranks), 'rank')} {TIMES} {many(int(cpus), 'CPU')}"
    title = f"Strong: {fastest} {'is' if ranks == 1 else 'are'} {best / base.median():.1f} {TIMES} as fast as one rank"
    finding(figure, title)
    caption(figure, where(runs))
    return described(figure, f"Dots, one a run, sorted by speed: {', '.join(names)} (fastest last). {title}.")


def wait_and_run(times: Mapping[str, tuple[float, float]], source: str) -> Picture:
    """Draw for each size the seconds until its job starts and the seconds that it runs, one bar behind the other."""
    figure, ax = plt.subplots(figsize=(8.5, 0.5 * len(times) + 1.3), layout="constrained")
    names, (waits, runs) = list(times), zip(*times.values(), strict=True)
    ax.barh(names, waits, color="#C4C4C4", label="waits")
    ax.barh(names, runs, left=waits, color=BLUE, label="runs")
    for row, (wait, run) in enumerate(times.values()):
        ax.annotate(
            f"{wait + run:.0f} s", (wait + run, row), (5, 0), textcoords="offset points", va="center", color=INK
        )
    ax.margins(x=0.1)
    ax.invert_yaxis()
    ax.set_xlabel("seconds from now")
    ax.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2, fontsize=SMALL["size"])
    first = min(times, key=lambda name: sum(times[name]))
    title = f"{first} has the result first, after {sum(times[first]):.0f} s"
    finding(figure, title)
    caption(figure, source)
    said = ", ".join(f"{name} waits {wait:.0f} s and runs {run:.0f} s" for name, (wait, run) in times.items())
    return described(figure, f"Bars of wait and run: {said}. {title}.")
