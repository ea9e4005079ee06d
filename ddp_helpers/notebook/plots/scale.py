"""What a job is handed and what it writes, against its number of ranks: batches, the sampler's time, bytes."""

import textwrap

import matplotlib.pyplot as plt
import pandas as pd

from ddp_helpers.notebook import style
from ddp_helpers.notebook.labels import at_the_right, caption, sizes
from ddp_helpers.notebook.picture import Picture, described

style.use()

PANELS = {  # title: the columns of the table that are drawn there, and their colours
    "one epoch": {"global batch": style.RED, "samples a rank": style.BLUE, "steps": style.GREEN},
    "seconds an epoch": {"ideal training": style.GREY, "sampler of each rank, seconds": style.BLUE},
    "bytes": {
        "random states in a checkpoint": style.RED,
        "sampler of each rank, memory": style.BLUE,
        "printed, if every rank did": style.GREY,
        "env.json": style.PURPLE,
        "printed by rank 0": style.GREEN,
    },
}


def scale(rows: pd.DataFrame, about: str) -> Picture:
    """Three panels on logarithmic axes. rows: one a number of ranks, with the columns of PANELS.

    about: for the caption, what the samples, the batch and the ideal are.
    """
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    for ax, (title, lines) in zip(axes, PANELS.items(), strict=True):
        labels = []
        for name, colour in lines.items():
            ax.plot(rows["ranks"], rows[name], "o-", color=colour, linewidth=2, markersize=5)
            labels.append((rows["ranks"].iloc[-1], rows[name].iloc[-1], textwrap.fill(name, 18), colour))
        ax.set_yscale("log")
        sizes(ax, rows["ranks"], "rank")
        ax.set_title(title, loc="left")
        at_the_right(ax, labels, gap=0.15)
    caption(figure, about)
    first, last = rows.iloc[0], rows.iloc[-1]
    said = "; ".join(f"{name} {first[name]:,.4g} to {last[name]:,.4g}" for lines in PANELS.values() for name in lines)
    return described(figure, f"From {first['ranks']:,.0f} to {last['ranks']:,.0f} ranks: {said}.")
