"""What lies beyond DDP, beside it: memory by kind, bytes sent, and speed."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.notebook import style
from ddp_helpers.notebook.labels import caption
from ddp_helpers.notebook.picture import Picture, described

KINDS = {
    "parameters": style.BLUE,
    "gradients": style.SKY,
    "optimizer state": style.ORANGE,
    "activations": style.GREEN,
    "copies": style.PURPLE,
}
MEANS = "copies: weights in another precision or gathered from other ranks, and what a hook keeps"
SPEED = "speed: DDP's time for a step, divided by this way's; the line spans the middle half of the turns"

style.use()


def memory_and_speed(table: pd.DataFrame, where: str) -> Picture:
    """A row for each way: memory stacked by kind, bytes sent in a step, speed. table: MB and ratios, a way a row.

    Columns: the KINDS, sent (MB, NaN where nobody knows), speed, low, high (of DDP's speed in the same run).
    """
    size = (9.5, 2.6 + 0.42 * len(table))
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=size, width_ratios=[5, 2, 2.6], sharey=True, layout="constrained"
    )
    memory(left, table)
    sent(middle, table)
    speed(right, table)
    left.set_yticks(range(len(table)), table.index)
    left.invert_yaxis()
    for ax in (left, middle, right):
        ax.tick_params(axis="y", length=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in KINDS.values()]
    figure.legend(handles, list(KINDS), loc="outside upper left", ncols=len(KINDS), fontsize=10)
    caption(figure, where, MEANS, SPEED)
    return described(figure, f"Ways beyond DDP, {where}. {' '.join(told(name, row) for name, row in table.iterrows())}")


def memory(ax: Axes, table: pd.DataFrame) -> None:
    """Stacked bars in MB, with their sums."""
    begin = pd.Series(0.0, index=table.index)
    for kind, colour in KINDS.items():
        ax.barh(range(len(table)), table[kind].astype(float), 0.7, begin, color=colour)
        begin = begin + table[kind].astype(float)
    for place, total in enumerate(begin):
        ax.text(total, place, f" {total:.0f}", va="center")
    ax.set(xlabel="MB held by rank 0", xlim=(0, 1.12 * begin.max()))


def sent(ax: Axes, table: pd.DataFrame) -> None:
    """Bars in MB; a word where nobody counted."""
    most = table["sent"].astype(float).max()
    for place, value in enumerate(table["sent"].astype(float)):
        ax.barh(place, 0 if pd.isna(value) else value, 0.7, color=style.GREY)
        text = "not counted" if pd.isna(value) else f"{value:.1f}"
        ax.text(0 if pd.isna(value) else value, place, f" {text}", va="center", fontsize=10)
    ax.set(xlabel="MB sent in a step", xlim=(0, 1.35 * (1 if pd.isna(most) else most)))


def speed(ax: Axes, table: pd.DataFrame) -> None:
    """A point and a line for each way, and DDP's speed as a line."""
    ax.axvline(1, color=style.GREY, linewidth=1, linestyle="--")
    for place, row in enumerate(table.itertuples()):
        ax.plot([row.low, row.high], [place, place], color=style.INK, linewidth=2, solid_capstyle="butt")
        ax.plot(row.speed, place, "o", color=style.INK, markersize=7)
        ax.text(1.02, place, f"{row.speed:.2f}", va="center", fontsize=10, transform=ax.get_yaxis_transform())
    ax.set(xlabel="speed (DDP is 1)", xlim=(0, 1.1 * max(table["high"].max(), table["speed"].max(), 1)))


def told(name: str, row: pd.Series) -> str:
    """One way in words."""
    kinds = ", ".join(f"{kind} {row[kind]:.1f}" for kind in KINDS if row[kind])
    bytes_sent = "bytes sent not counted" if pd.isna(row["sent"]) else f"{row['sent']:.1f} MB sent in a step"
    return f"{name}: MB of {kinds}; {bytes_sent}; {row['speed']:.2f} of DDP's speed."
