"""The figures of notebook 13: which method to choose, who holds what, what was measured.

The notebook calls them, in its own process; they draw from their arguments alone.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write_text
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LEFT,
    ORANGE,
    PURPLE,
    RIGHT,
    SKY,
    SMALL,
)

# ---- which to choose


class _Choice(NamedTuple):
    """A method, and the question to which yes means it; the last has none."""

    question: str
    method: str
    price: str
    colour: str


_CHOICES = [
    _Choice(
        "Does all fit: a replica with\nits state, and the batch?",
        "DDP",
        "nothing more; the reference for all below",
        BLUE,
    ),
    _Choice(
        "Does it fit with a\nsmaller batch?",
        "DDP, with accumulation, autocast or recomputation",
        "small pieces, computing twice, or rounding; no more is sent",
        SKY,
    ),
    _Choice(
        "Does it fit with the\noptimizer state cut?",
        "DDP, with ZeroRedundancyOptimizer",
        "a broadcast of the weights in each step",
        ORANGE,
    ),
    _Choice(
        "Does a layer fit whole,\nbeside 1/N of the rest?",
        "FSDP2: fully_shard",
        "weights gathered twice a step; checkpoints in parts",
        GREEN,
    ),
    _Choice(
        "",
        "FSDP2 with tensor parallel, then pipeline",
        "activations sent inside each layer: within a node; then from stage to stage",
        PURPLE,
    ),
]
_CURES = {  # by condition, whatever the choice
    "The network is the limit, as measured:": "with DDP, a bf16 hook first, then PowerSGD",
    "The ranks have unequal numbers of batches:": "even them out in the sampler; else Join",
    "The device has units for bfloat16:": "autocast, for time",
}
# Of the boxes: the top of the first, the distance from one to the next, their height, the middle
# and the width of those on the left, and the left edge of those on the right.
_TOP, _DISTANCE, _HEIGHT, _MIDDLE, _WIDE, _METHODS_LEFT = 0.6, 1.0, 0.66, 1.4, 2.6, 3.5


def choose() -> Picture:
    """Draw how to go from what fits to a method: ask in this order, and take the first yes."""
    title = "Ask in this order, and take the first yes"
    foot = _TOP + _DISTANCE * len(_CHOICES)
    ax = canvas(foot + 0.25 + 0.34 * len(_CURES), title)
    for row, choice in enumerate(_CHOICES):
        _draw_choice(ax, row, choice)
    write_text(ax, LEFT, foot + 0.02, "Beside that", ha="left", weight="bold")
    for row, (condition, cure) in enumerate(_CURES.items()):
        y = foot + 0.36 + 0.34 * row
        write_text(ax, LEFT, y, condition, ha="left", size=11)
        write_text(ax, 3.65, y, cure, ha="left", weight="bold", size=11)
    lines = [
        f"{choice.question} {choice.method}.".replace("\n", " ").lstrip() for choice in _CHOICES
    ]
    lines += [f"{condition} {cure}." for condition, cure in _CURES.items()]
    return described(ax.figure, f"{title}. {' '.join(lines)}")


def _draw_choice(ax: Axes, row: int, choice: _Choice) -> None:
    """Draw a question, the arrow that leads to it from the row above, and the method for yes."""
    y = _TOP + _DISTANCE * row
    above = y - _DISTANCE + _HEIGHT  # where the box of the row above ends
    middle = y + _HEIGHT / 2
    if row:
        between = y - (_DISTANCE - _HEIGHT) / 2
        write_text(ax, _MIDDLE + 0.1, between, "no", ha="left", **SMALL)
    if choice.question:
        if row:
            arrow(ax, (_MIDDLE, above), (_MIDDLE, y))
        box(ax, (LEFT, y), (_WIDE, _HEIGHT), choice.question, INK, fill=0.06, size=11)
        write_text(ax, 3.08, middle - 0.15, "yes", weight="bold", size=11)
        start = LEFT + _WIDE + 0.02
    else:
        ax.plot([_MIDDLE, _MIDDLE], [above, middle], color=INK, linewidth=1.6)
        start = _MIDDLE
    arrow(ax, (start, middle), (_METHODS_LEFT - 0.02, middle))
    size = RIGHT - _METHODS_LEFT, _HEIGHT
    box(ax, (_METHODS_LEFT, y), size, colour=choice.colour, fill=0.15)
    write_text(ax, 3.65, y + 0.21, choice.method, ha="left", weight="bold", size=11)
    write_text(ax, 3.65, y + 0.46, choice.price, ha="left", **SMALL)


# ---- who holds what

KINDS = {  # of memory, and their colours
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer state": ORANGE,
    "activations": GREEN,
    "copies": PURPLE,
}
_CUTS: dict[str, list[str]] = {  # by method, the kinds of which each of two ranks holds half
    "DDP": [],
    "ZeRO": ["optimizer state"],
    "FSDP2": ["parameters", "gradients", "optimizer state"],
}
_GATHER = "FSDP2 gathers a layer to compute it, tensor parallel never does."


def _share(method: str, kind: str) -> float:
    """Return the share of a kind of memory that each of two ranks holds."""
    return 0.5 if kind in _CUTS[method] else 1.0


def who_holds(held: dict[str, float]) -> Picture:
    """Draw what each of two ranks keeps between steps, by method, with shards cut evenly.

    held: the bytes of a replica, by kind.
    """
    kept = {}  # MB, by method
    for method in _CUTS:
        kept[method] = sum(_share(method, kind) * size for kind, size in held.items()) / 1e6
    zero, fsdp = (f"{kept[method] / kept['DDP']:.0%}" for method in ("ZeRO", "FSDP2"))
    title = f"Each of 2 ranks keeps {zero} of DDP's memory with ZeRO, {fsdp} with FSDP2"
    ax = canvas(4.55, title)
    for row, method in enumerate(_CUTS):
        top = 0.95 + 1.15 * row
        y = top + (0.21 if method == "FSDP2" else 0.42)  # FSDP2 has a second line below it
        write_text(ax, LEFT, y, method, ha="left", weight="bold")
        _draw_holdings(ax, top, method, held)
        for rank in (0, 1):
            y = top + 0.19 + 0.46 * rank
            write_text(ax, 1.75, y, f"rank {rank}", ha="right", **SMALL)
            write_text(ax, RIGHT, y, f"{kept[method]:.0f} MB", ha="right", weight="bold")
    for x, width, kind in _columns(held):
        write_text(ax, x + width / 2, 0.72, kind, size=11)
    write_text(ax, LEFT, 3.79, "tensor parallel,\nwhere it cuts", ha="left", **SMALL)
    note = f"Computed, float32 with Adam. Dotted: on the other rank. {_GATHER}"
    write_text(ax, LEFT, 4.35, note, ha="left", color=GREY, **SMALL)
    sizes = ", ".join(f"{method} {size:.0f} MB" for method, size in kept.items())
    cuts = "ZeRO cuts the optimizer state, FSDP2 all three kinds"
    return described(ax.figure, f"{title}: {sizes}. {cuts}. {_GATHER}")


class _Column(NamedTuple):
    """Where a kind of memory is drawn."""

    x: float
    width: float
    kind: str


def _columns(held: dict[str, float]) -> list[_Column]:
    """List where each kind is drawn, as wide as it is large. held: bytes by kind."""
    scale = 6.3 / sum(held.values())
    columns, x = [], 1.9
    for kind, size in held.items():
        columns.append(_Column(x, size * scale, kind))
        x += size * scale
    return columns


def _draw_holdings(ax: Axes, top: float, method: str, held: dict[str, float]) -> None:
    """Draw what the two ranks hold with a method, one below the other. held: bytes by kind."""
    for x, width, kind in _columns(held):
        share = _share(method, kind)
        size = share * held[kind]
        label = f"{size / 1e6:,.1f} MB" if held[kind] < 1e8 else f"{size / 1e6:,.0f} MB"
        for rank in (0, 1):
            y = top + 0.46 * rank
            shard_x = x + (1 - share) * width * rank
            box(ax, (x, y), (width - 0.08, 0.38), line=":", fill=0)
            box(ax, (shard_x, y), (share * width - 0.08, 0.38), label, KINDS[kind], size=10)


# ---- memory, bytes and speed as measured

_COPIES_NOTE = "copies: weights in another precision or gathered from other ranks"
_SPEED_NOTE = "speed: DDP's time for a step, divided by this way's; "
_SPEED_NOTE += "the line spans the middle half of the turns"


def memory_and_speed(table: pd.DataFrame, where: str) -> Picture:
    """Draw a row for each method: memory stacked by kind, MB sent in a step, and the speed.

    table: MB and ratios, a method a row. Its columns: the KINDS; held; sent, NaN where nobody
    knows; speed, low and high, of DDP's speed in the same run. where: the machine, for the caption.
    """
    table = table.sort_values("held", ascending=False, kind="stable")
    size = 9.5, 2.6 + 0.42 * len(table)
    figure, axes = plt.subplots(1, 3, figsize=size, width_ratios=[5, 2, 2.6], sharey=True)
    for ax, draw in zip(axes, (_draw_memory, _draw_sent, _draw_speed), strict=True):
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
    write_caption(figure, where, _COPIES_NOTE, _SPEED_NOTE)
    figure.set_layout_engine("constrained", wspace=0.05)
    rows = [
        f"{name} {row.held:.1f} MB, {row.speed:.2f} of DDP's speed"
        for name, row in table.iterrows()
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


def _draw_speed(ax: Axes, table: pd.DataFrame) -> None:
    """Draw a point and a line from low to high for each method, and a line for DDP's speed."""
    ax.axvline(1, color=GREY, linewidth=1, linestyle="--")
    beside = ax.get_yaxis_transform()
    for row in range(len(table)):
        low, speed, high = table[["low", "speed", "high"]].iloc[row].astype(float)
        ax.plot([low, high], [row, row], color=INK, linewidth=2, solid_capstyle="butt")
        ax.plot(speed, row, "o", color=INK, markersize=7)
        ax.text(1.02, row, f"{speed:.2f}", va="center", fontsize=10, transform=beside)
    most = max(table["high"].max(), table["speed"].max(), 1)
    ax.set(xlabel="speed (DDP is 1)", xlim=(0, 1.1 * most))
