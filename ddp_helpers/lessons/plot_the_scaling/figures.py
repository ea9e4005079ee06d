"""Figures of notebook 09: speed-up, efficiency, shares of the time, device-hours, and the size of a large job."""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.notebook.drawing import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Picture, described, rank_colour
from ddp_helpers.notebook.labels import LABEL, at_the_right, caption, colours, setting, sizes
from ddp_helpers.notebook.scaling import many, unit, where

PANELS = {"speedup": "speed-up", "efficiency": "efficiency"}


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
        labels += [line(ax, rows, what, rank_colour(place)) for place, (_, rows) in enumerate(settings)]
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
    return ranks[-1], values[-1], f"{table['name']}: {number(what, values[-1])}", GREY


def against(ax: Axes, what: str, most: float, base: int) -> LABEL:
    """The ideal, and the limits and form of the axis."""
    ends = np.array([base, base * most])
    ax.plot(ends, ends / base if what == "speedup" else [1, 1], ":", color=INK, linewidth=1.2, zorder=0)
    if what == "speedup":
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return ends[1], most, "ideal", INK
    ax.set_ylim(0, max(1.05, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return ends[1], 1.0, "ideal", INK


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


SCALES = {  # title: the columns of the table that are drawn there, and their colours
    "one epoch": {"global batch": RED, "samples a rank": BLUE, "steps": GREEN},
    "seconds an epoch": {"ideal training": GREY, "sampler of each rank, seconds": BLUE},
    "bytes": {
        "random states in a checkpoint": RED,
        "sampler of each rank, memory": BLUE,
        "printed, if every rank did": GREY,
        "env.json": PURPLE,
        "printed by rank 0": GREEN,
    },
}


def scale(rows: pd.DataFrame, about: str) -> Picture:
    """Three panels on logarithmic axes. rows: one a number of ranks, with the columns of PANELS.

    about: for the caption, what the samples, the batch and the ideal are.
    """
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    for ax, (title, lines) in zip(axes, SCALES.items(), strict=True):
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
    said = "; ".join(f"{name} {first[name]:,.4g} to {last[name]:,.4g}" for lines in SCALES.values() for name in lines)
    return described(figure, f"From {first['ranks']:,.0f} to {last['ranks']:,.0f} ranks: {said}.")


UNKNOWN = "not told apart"
PARTS = {"data": ORANGE, "compute": BLUE, "communication": RED, UNKNOWN: "#CCCCCC"}
DARK = (BLUE, RED)


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
    said = "; ".join(f"{name}: {told_shares(shown)}" for name, shown in zip(names, parts, strict=True))
    return described(figure, f"Shares of the training time, {rows['where'].iloc[0]}. {said}.")


def told_shares(shown: dict[str, float]) -> str:
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
            look = {"color": "white" if PARTS[part] in DARK else INK, "ha": "center", "va": "center"}
            ax.text(left + share / 2, place, f"{share:.0%}", **look)
        left += share


def time_cost(per_run: pd.DataFrame, target: float, left_out: str = "") -> Picture:
    """A point a run, from what scaling.per_run gives for this target (0 to 1); its colour is the number of ranks.

    Runs that never reached the target are counted in the caption.
    """
    reached, name = per_run.dropna(subset=["to_target"]), unit(per_run)
    hues = colours(sorted(per_run["world_size"].unique()))
    figure, ax = plt.subplots(figsize=(9.5, 4.8), layout="constrained")
    labels, said = [], []
    for (scaling, cpus, ranks), rows in reached.groupby(["scaling", "cpus_per_task", "world_size"], dropna=False):
        ax.scatter(rows["device_hours"], rows["to_target"], color=hues[ranks], s=45, alpha=0.8)
        middle, text = rows[["device_hours", "to_target"]].median(), f"{many(ranks, name)}, {setting(scaling, cpus)}"
        labels.append((*middle, text, hues[ranks]))
        said.append(f"{text}: {middle['to_target']:.3g} s for {middle['device_hours']:.2g} hours")
    hours = "GPU-hours" if name == "GPU" else "device-hours (ranks times hours)"
    ax.set(xlabel=f"{hours} of the whole run", ylabel=f"seconds to {target:.0%} test accuracy", xlim=0, ylim=0)
    at_the_right(ax, labels)
    if reached.empty:
        ax.text(0.5, 0.5, f"no run reached {target:.0%}", transform=ax.transAxes, ha="center")
    figure.suptitle(f"What faster costs: {where(per_run)}", fontsize=12)
    never = len(per_run) - len(reached)
    missed = f"{many(never, 'run')} never reached {target:.0%}" if never else ""
    caption(figure, "lower is faster, further left is cheaper; a label stands at its median", missed, left_out)
    alt = f"Seconds to {target:.0%} accuracy and {hours}, {where(per_run)}"
    return described(figure, f"{alt}. {'; '.join(said) or 'No run reached it'}.")
