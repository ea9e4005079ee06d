"""Draw a step's time by ranks, an all-reduce's by size, a batch's by network, and assumptions.

Notebooks 12 and 12b call it in the driver process.
"""

from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, stacked_bars
from ddp_helpers.draw.style import BLUE, GREY, INK, RED, SKY, WIDTH, rank_colour
from ddp_helpers.records.scaling import counted

# The parts of a rank's seconds: it computes, waits for late ranks, and exchanges gradients.
_PARTS = {"compute": BLUE, "wait": "#CCCCCC", "exchange": RED}


def draw_parts_by_size(seconds: Mapping[int, Sequence[float]], steps: str) -> Picture:
    """Draw the parts of rank 0's seconds, a bar for each number of ranks.

    seconds: by the number of ranks, the three numbers of _PARTS. steps: for the caption.
    """
    rows = {counted(size, "rank"): values for size, values in seconds.items()}
    table = pd.DataFrame(rows, index=list(_PARTS)).T
    figure, ax, columns = stacked_bars(table, _PARTS, figsize=(WIDTH, 2.1 + 0.42 * len(table)))
    longest = table.sum(axis=1).max()
    for bars, part in zip(columns, _PARTS, strict=True):
        texts = [f"{each:.2f}" if each > 0.06 * longest else "" for each in table[part]]
        ax.bar_label(bars, texts, label_type="center", color="white" if part == "compute" else INK)
    ax.set_xlabel("seconds")
    ax.legend(ncols=len(_PARTS), loc="lower left", bbox_to_anchor=(-0.01, 0.99), fontsize=10)
    (alone, *_), *_, (compute, wait, exchange) = seconds.values()
    title = f"On {max(seconds)} ranks sharding saves {alone - compute:.1f} s of computing, "
    title += f"wait and exchange cost {wait + exchange:.1f} s"
    return captioned(figure, title, f"rank 0, {steps}")


def draw_by_size(
    took: Mapping[int, float],
    latency: float,
    bandwidth: float,
    where: str,
) -> Picture:
    """Draw the time of an all-reduce of two ranks by its bytes, and the line of the two numbers.

    took: seconds by bytes; latency: in seconds; bandwidth: in bytes/s; where: the machine, for the
    caption.
    """
    sizes = np.array(list(took))
    fine = np.geomspace(sizes[0], sizes[-1], 200)
    figure, ax = plt.subplots(figsize=(WIDTH, 3.9), layout="constrained")
    line = 1e3 * (latency + fine / bandwidth)
    ax.loglog(fine, line, "--", color=GREY, label="latency + bytes / bandwidth")
    ax.loglog(sizes, 1e3 * np.array(list(took.values())), "o-", color=BLUE, label="measured")
    ax.set(xlabel="bytes in the all-reduce", ylabel="time [ms]")
    ax.xaxis.set_major_formatter(EngFormatter("B", sep=""))
    _plain_numbers(ax)
    ax.legend()
    title = f"Up to {latency * bandwidth / 1e3:,.0f} kB an all-reduce is mostly latency, "
    title += f"{1e3 * latency:.2g} ms; beyond, {bandwidth / 1e9:.2g} GB/s"
    return captioned(figure, title, f"2 ranks, {where}")


def draw_by_rate(
    measured: Mapping[int, Mapping[str, float]],
    predict: Callable[[str, float], float],
    where: str,
) -> Picture:
    """Draw the time of a batch by bandwidth, a line for each way; the prediction is dashed.

    measured: seconds by Mbit/s and way; 0, the open network, is at the right. predict: seconds
    by way and Mbit/s. where: the machine, for the caption.
    """
    rates = sorted(filter(None, measured))
    away = 15 * rates[-1]  # the place of the open network
    fine = np.geomspace(rates[0] / 1.5, 8 * rates[-1], 200)
    figure, ax = plt.subplots(figsize=(WIDTH, 4.8), layout="constrained")
    for number, way in enumerate(measured[0]):
        colour = rank_colour(number)
        predicted = [1e3 * predict(way, rate) for rate in fine]
        ax.loglog(fine, predicted, "--", alpha=0.7, color=colour)
        taken = [1e3 * measured[rate][way] for rate in rates]
        ax.loglog(rates, taken, "o-", label=way, color=colour)
        ax.loglog(away, 1e3 * measured[0][way], "o", color=colour)
    ax.plot([], [], "--", color=GREY, label="predicted")
    ax.set(xlabel="bandwidth of the loopback device [Mbit/s]", ylabel="time of a batch [ms]")
    ax.set_xticks([*rates, away], [*(f"{rate:,}" for rate in rates), "open"])
    ax.xaxis.minorticks_off()
    _plain_numbers(ax)
    ax.legend(ncols=2)
    slow, fast = (measured[rate]["DDP"] / measured[rate]["PowerSGD"] for rate in (rates[0], 0))
    title = f"At {rates[0]} Mbit/s DDP takes {slow:.0f} times PowerSGD's time, "
    title += f"on the open network {fast:.1f} times"
    return captioned(figure, title, f"2 ranks, {where}")


def _plain_numbers(ax: Axes) -> None:
    """Write 1, 2 and 5 at a logarithmic y axis instead of powers of 10."""
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda *_: "")


def draw_assumptions(ends: Mapping[str, tuple[float, float]], few: int, many: int) -> Picture:
    """Draw a row for each set of assumptions: the efficiency on few and on many GPUs.

    ends: both efficiencies by the name of the set; NaN on few marks a published one.
    """
    size = WIDTH, 1.7 + 0.36 * len(ends)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    for row, (near, far) in enumerate(ends.values()):
        is_published = np.isnan(near)
        ax.plot([near, far], [row, row], color=SKY, linewidth=4)
        (ring,) = ax.plot(near, row, "o", color="white", markersize=8)
        ring.set(markeredgecolor=BLUE, markeredgewidth=2)
        marker, colour = ("s", GREY) if is_published else ("o", BLUE)
        ax.plot(far, row, marker, color=colour, markersize=8)
        ax.text(far - 0.02, row, f"{far:.0%}", ha="right", va="center", color=INK)
    ax.set_yticks(range(len(ends)), list(ends))
    ax.set(ylim=(len(ends) - 0.5, -0.5), xlim=(-0.1, 1.05), xticks=np.arange(0, 1.01, 0.25))
    ax.set_xlabel("efficiency against one GPU")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    computed = [far for near, far in ends.values() if not np.isnan(near)]
    low, high = min(computed), max(computed)
    title = f"One assumption decides: {low:.0%} to {high:.0%} on {many:,} GPUs"
    marks = f"computed, not measured. Open circle: {few} GPUs, dot: {many:,}; "
    marks += "squares: published, of a model not named"
    return captioned(figure, title, marks)
