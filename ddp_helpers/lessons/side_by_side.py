"""Draw methods of training side by side: what a rank holds in memory, by kind, and what it sends.

Notebooks 14 and 15 call it, in their own process, with rows that `lessons.measure` makes.
"""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY

KINDS = {  # of memory, and their colours
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer state": ORANGE,
    "activations": GREEN,
    "copies": PURPLE,
}

_COPIES_NOTE = "copies: weights in another precision or gathered from other ranks"


def memory_and_bytes(table: pd.DataFrame, where: str) -> Picture:
    """Draw a row for each method: memory stacked by kind, and MB sent in a step.

    table: MB and ratios, a method a row. Its columns: the KINDS; held; sent, NaN where nobody
    knows. where: the machine, for the caption.
    """
    table = table.sort_values("held", ascending=False, kind="stable")
    size = 9.5, 2.6 + 0.42 * len(table)
    figure, axes = plt.subplots(1, 2, figsize=size, width_ratios=[5, 2.4], sharey=True)
    for ax, draw in zip(axes, (_draw_memory, _draw_sent), strict=True):
        draw(ax, table)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(table)), table.index)
    axes[0].invert_yaxis()
    axes[0].set_title(" ", pad=10)  # makes room for the legend, which is wider than its axes
    legend = axes[0].legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=5, fontsize=10)
    legend.set_in_layout(False)
    share = table["held"].min() / table["held"]["DDP"]
    title = f"{table.index[-1]} holds the least: {share:.0%} of what DDP holds"
    write_title(figure, title)
    write_caption(figure, where, _COPIES_NOTE)
    figure.set_layout_engine("constrained", wspace=0.05)
    rows = [
        f"{name} holds {row.held:.1f} MB, sends {row.sent:.1f} MB" for name, row in table.iterrows()
    ]
    return described(figure, f"{title}; {where}. {'; '.join(rows)}.")


def _draw_memory(ax: Axes, table: pd.DataFrame) -> None:
    """Draw stacked bars in MB, with their sums."""
    total = pd.Series(0.0, index=table.index)
    for kind, colour in KINDS.items():
        megabytes = table[kind].astype(float)
        ax.barh(range(len(table)), megabytes, 0.7, total, color=colour, label=kind)
        total = total + megabytes
    for row, value in enumerate(total):
        ax.text(value, row, f" {value:.0f}", va="center")
    ax.set(xlabel="MB held by rank 0", xlim=(0, 1.12 * total.max()))


def _draw_sent(ax: Axes, table: pd.DataFrame) -> None:
    """Draw bars in MB; `not counted` where nobody knows."""
    megabytes = table["sent"].astype(float)
    counted = megabytes.notna()
    for row, value in enumerate(megabytes.fillna(0)):
        ax.barh(row, value, 0.7, color=GREY)
        label = f"{value:.1f}" if counted.iloc[row] else "not counted"
        ax.text(value, row, f" {label}", va="center", fontsize=10)
    most = megabytes.max() if counted.any() else 1
    ax.set(xlabel="MB sent in a step", xlim=(0, 1.35 * most))
