"""Draw methods of training side by side: what a rank holds in memory, by kind, and what it sends.

Notebooks 14 and 15 call it, in the driver process, with rows that `lessons.measure` makes.
"""

import math

import matplotlib.pyplot as plt
import pandas as pd

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, stacked_bars
from ddp_helpers.draw.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY

KINDS = {  # of memory, and their colours
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer state": ORANGE,
    "activations": GREEN,
    "copies": PURPLE,
}


def memory_and_bytes(table: pd.DataFrame, where: str) -> Picture:
    """Draw a row for each method: memory stacked by kind, and MB sent in a step.

    table: MB and ratios, one row per method. Its columns: the KINDS; held; sent, NaN if not
    counted. where: the machine, for the caption.
    """
    table = table.sort_values("held", ascending=False, kind="stable")
    size = 9.5, 2.6 + 0.42 * len(table)
    figure, (held, sent) = plt.subplots(1, 2, figsize=size, width_ratios=[5, 2.4], sharey=True)
    kinds = table[list(KINDS)].astype(float)
    *_, (*_, last) = stacked_bars(kinds, KINDS, ax=held)
    totals = kinds.sum(axis=1)
    held.bar_label(last, [f" {total:.0f}" for total in totals])
    held.set(xlabel="MB held by rank 0", xlim=(0, 1.12 * totals.max()))
    held.set_title(" ", pad=10)  # makes room for the legend, which is wider than its axes
    legend = held.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=5, fontsize=10)
    legend.set_in_layout(False)
    megabytes = table["sent"].astype(float)
    texts = [" not counted" if math.isnan(each) else f" {each:.1f}" for each in megabytes]
    bars = sent.barh(range(len(table)), megabytes.fillna(0), 0.7, color=GREY)
    sent.bar_label(bars, texts, fontsize=10)
    sent.set(xlabel="MB sent per step", xlim=(0, 1.35 * (megabytes.fillna(0).max() or 1)))
    sent.tick_params(axis="y", which="both", length=0)
    share = table["held"].min() / table["held"]["DDP"]
    title = f"{table.index[-1]} holds the least: {share:.0%} of what DDP holds"
    rows = [
        f"{name} holds {row.held:.1f} MB, sends {row.sent:.1f} MB" for name, row in table.iterrows()
    ]
    note = "copies: weights in another precision or gathered from other ranks"
    return captioned(figure, title, where, note, alt="; ".join(rows))
