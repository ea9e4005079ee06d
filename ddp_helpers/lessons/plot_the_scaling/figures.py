"""Speed-up and efficiency against the ideal, with the spread over repeats, and published figures beside."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.notebook import style
from ddp_helpers.notebook.labels import LABEL, at_the_right, caption, setting, sizes
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.scaling import many

PANELS = {"speedup": "speed-up", "efficiency": "efficiency"}

style.use()


def speedup(speedups: pd.DataFrame, published: Sequence[Mapping] = (), left_out: str = "") -> Picture:
    """Two panels, from what scaling.speedup gives: speed-up and efficiency of each setting, lowest to highest as bars.

    published: tables of published.json, drawn muted. left_out: what scaling.left_out says, for the caption.
    """
    settings, unit = list(speedups.groupby(["scaling", "cpus_per_task"], dropna=False)), speedups["unit"].iloc[0]
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 5), layout="constrained")
    counts = [*speedups["world_size"], *(count for table in published for count in table["ranks"])]
    for ax, (what, title) in zip(axes, PANELS.items(), strict=True):
        sizes(ax, counts, unit)
        labels = [beside(ax, table, what) for table in published]
        labels += [line(ax, rows, what, style.rank_colour(place)) for place, (_, rows) in enumerate(settings)]
        labels += [against(ax, what, max(counts) / speedups["base"].min(), speedups["base"].min())]
        ax.set_title(title, loc="left")
        at_the_right(ax, labels)
    bases = speedups["base"].unique()
    base = many(bases[0], unit) if len(bases) == 1 else f"the fewest {unit}s of each line"
    figure.suptitle(f"{speedups['where'].iloc[0]}, against {base}", fontsize=12)
    kinds = {"strong": "strong: the same global batch", "weak": "weak: the same batch per rank"}
    repeats = "bars: lowest to highest repeat" if speedups["repeats"].max() > 1 else "one run a setting: no spread"
    muted = "grey: published, on other machines, each against its own first size" if published else ""
    caption(figure, "; ".join(kinds[kind] for kind in speedups["scaling"].unique()), repeats, muted, left_out)
    return described(
        figure, f"Speed-up and efficiency against {base}, {speedups['where'].iloc[0]}. {told(settings, unit)}"
    )


def line(ax: Axes, rows: pd.DataFrame, what: str, colour: str) -> LABEL:
    """One setting with its spread, and its label."""
    rows = rows.sort_values("world_size")
    reach = np.abs(rows[[f"{what}_low", f"{what}_high"]].sub(rows[what], axis=0).to_numpy().T)
    ax.errorbar(rows["world_size"], rows[what], reach, fmt="o-", color=colour, linewidth=2, capsize=4, zorder=3)
    name = setting(rows["scaling"].iloc[0], rows["cpus_per_task"].iloc[0])
    return *rows[["world_size", what]].iloc[-1], f"{name}: {number(what, rows[what].iloc[-1])}", colour


def beside(ax: Axes, table: Mapping, what: str) -> LABEL:
    """A published table, muted, and its label."""
    ranks, seconds = np.array(table["ranks"]), np.array(table["seconds"])
    values = seconds[0] / seconds if what == "speedup" else seconds[0] * ranks[0] / seconds / ranks
    ax.plot(ranks, values, "s-", color="#AAAAAA", linewidth=1, markersize=4, zorder=1)
    return ranks[-1], values[-1], f"{table['name']}: {number(what, values[-1])}", style.GREY


def against(ax: Axes, what: str, most: float, base: int) -> LABEL:
    """The ideal, and the limits and form of the axis."""
    ends = np.array([base, base * most])
    ax.plot(ends, ends / base if what == "speedup" else [1, 1], ":", color=style.INK, linewidth=1.2, zorder=0)
    if what == "speedup":
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return ends[1], most, "ideal", style.INK
    ax.set_ylim(0, max(1.05, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return ends[1], 1.0, "ideal", style.INK


def number(what: str, value: float) -> str:
    """A speed-up, or an efficiency, as text."""
    return f"{value:.1f}" if what == "speedup" else f"{value:.0%}"


def told(settings: Sequence, unit: str) -> str:
    """Every setting in words."""
    said = []
    for (scaling, cpus), rows in settings:
        points = (
            f"{many(row['world_size'], unit)} {row['speedup']:.2f} ({row['efficiency']:.0%})"
            for _, row in rows.sort_values("world_size").iterrows()
        )
        said.append(f"{setting(scaling, cpus)}: {', '.join(points)}")
    return f"Speed-up, and efficiency in brackets. {'; '.join(said)}."
