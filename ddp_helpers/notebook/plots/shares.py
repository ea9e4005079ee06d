"""Where the training time goes: waiting for data, computing, waiting for other ranks."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.notebook import style
from ddp_helpers.notebook.labels import caption, setting
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.scaling import many

UNKNOWN = "not told apart"
PARTS = {"data": style.ORANGE, "compute": style.BLUE, "communication": style.RED, UNKNOWN: "#CCCCCC"}
DARK = (style.BLUE, style.RED)

style.use()


def shares(speedups: pd.DataFrame, left_out: str = "") -> Picture:
    """A bar a setting, from what scaling.speedup gives, medians over repeats; a part that no record tells is grey."""
    rows = speedups.sort_values(["scaling", "cpus_per_task", "world_size"])
    names = [
        f"{many(row.world_size, row.unit)} ({setting(row.scaling, row.cpus_per_task)})" for row in rows.itertuples()
    ]
    parts = [split(row) for _, row in rows.iterrows()]
    figure, ax = plt.subplots(figsize=(9.5, 2.2 + 0.45 * len(rows)), layout="constrained")
    for place, shown in enumerate(parts):
        bar(ax, place, shown)
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="share of the training time of an epoch")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    used = [part for part in PARTS if any(part in shown for shown in parts)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=PARTS[part]) for part in used]
    ax.legend(handles, used, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(used))
    figure.suptitle(f"Where the time goes: {rows['where'].iloc[0]}", fontsize=12)
    waits = "communication: backward has ended and waits for other ranks' gradients" if "communication" in used else ""
    caption(figure, waits, left_out)
    said = "; ".join(f"{name}: {told(shown)}" for name, shown in zip(names, parts, strict=True))
    return described(figure, f"Shares of the training time, {rows['where'].iloc[0]}. {said}.")


def told(shown: dict[str, float]) -> str:
    """The shares of one setting in words."""
    return ", ".join(f"{part} {share:.0%}" for part, share in shown.items())


def split(row: pd.Series) -> dict[str, float]:
    """The shares of one setting, what is not recorded as one part, so that they add up to 1."""
    known = {part: row[part] for part in ("data", "compute", "communication") if pd.notna(row[part])}
    total = sum(known.values())
    if len(known) == 3:
        return {part: share / total for part, share in known.items()}
    return known | {UNKNOWN: max(0, 1 - total)}


def bar(ax: Axes, place: int, shown: dict[str, float]) -> None:
    """One stacked bar, with the shares that have room written into it."""
    left = 0.0
    for part, share in shown.items():
        ax.barh(place, share, 0.65, left, color=PARTS[part])
        if share > 0.05:
            look = {"color": "white" if PARTS[part] in DARK else style.INK, "ha": "center", "va": "center"}
            ax.text(left + share / 2, place, f"{share:.0%}", **look)
        left += share
