"""Figures of notebook 09: strong and weak as bricks, speed-up, shares of the time, and what faster costs."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw import drawing
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import (
    Label,
    at_the_right,
    captioned,
    colours,
    line_name,
    scale_ranks_axis,
)
from ddp_helpers.draw.style import GREY, INK, LEFT, ORANGE, TIMES, WIDTH, WRONG, rank_colour
from ddp_helpers.lessons.plot_the_scaling.advice import extremes
from ddp_helpers.records.scaling import counted, data_and_machine, unit_of_ranks


def bricks(counts: Sequence[int] = (1, 2, 4), batch: int = 8) -> Picture:
    """One step on 1, 2 and 4 ranks: a brick is an image, a column is a rank, its height the work of that rank."""
    ax = drawing.canvas(4.3, title := "Strong: a step gets shorter. Weak: a step does more.")
    for floor, kind, kept in ((2.0, "strong", "the same\nglobal batch"), (3.95, "weak", "the same\nbatch per rank")):
        drawing.write_text(ax, LEFT, floor - 1.1, kind, ha="left", weight="bold")
        drawing.write_text(ax, LEFT, floor - 0.8, kept, ha="left")
        for count, (left, _) in zip(counts, drawing.equal_parts(1.9, WIDTH - 0.1, len(counts), gap=0.3), strict=True):
            high = batch // count if kind == "strong" else batch
            for rank in range(count):
                for brick in range(high):
                    corner = (left + 0.5 * rank, floor - 0.16 * (brick + 1))
                    drawing.box(ax, corner, (0.44, 0.14), "", rank_colour(rank), fill=0.5)
            said = f"{counted(count, 'rank')}: {high * count} images a step"
            drawing.write_text(ax, left, floor + 0.18, said, ha="left", size=10.5)
    return drawing.described(ax.figure, f"Bricks, an image each, a column a rank. {title}")


def speedup(speedups: pd.DataFrame, published: Sequence[Mapping] = (), left_out: str = "") -> Picture:
    """The speed-up of each setting with its spread, from what scaling.speedup gives, beside published tables, muted."""
    unit, counts = speedups["unit"].iloc[0], [*speedups["world_size"], *(n for one in published for n in one["ranks"])]
    figure, ax = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    scale_ranks_axis(ax, counts, unit)
    settings = list(speedups.groupby(["scaling", "cpus_per_task"], dropna=False))
    labels = [beside(ax, table) for table in published]
    labels += [line(ax, rows, rank_colour(place)) for place, (_, rows) in enumerate(settings) if len(rows) > 1]
    base, most = speedups["base"].min(), max(counts)
    ax.plot([base, most], [1, most / base], ":", color=INK, linewidth=1.2, zorder=0)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel(f"times as fast as {counted(base, unit)}")
    at_the_right(ax, [*labels, (most, most / base, "ideal", INK)], gap=0.055)
    best = speedups.loc[speedups["speedup"].idxmax()]
    title, muted = f"At best {best['speedup']:.1f} times as fast, on {counted(best['world_size'], unit)}", ""
    if published:
        gained, ranks = max((one["seconds"][0] / one["seconds"][-1], one["ranks"][-1]) for one in published)
        title += f"; published: {gained:.0f} times, on {ranks} GPUs"
        muted = "grey: published, on other machines, each against its own first size"
    bars = "bars: lowest to highest repeat; in brackets: efficiency"
    alone = [line_name(*name) for name, rows in settings if len(rows) == 1]
    alone = f"one size only: {', '.join(alone)}" if alone else ""
    return captioned(figure, title, speedups["where"].iloc[0], bars, muted, alone, left_out)


def line(ax: Axes, rows: pd.DataFrame, colour: str) -> Label:
    """One setting with its spread, and its label."""
    reach = np.abs(rows[["speedup_low", "speedup_high"]].sub(rows["speedup"], axis=0).to_numpy().T)
    ax.errorbar(rows["world_size"], rows["speedup"], reach, fmt="o-", color=colour, linewidth=2.5, capsize=4, zorder=3)
    last = rows.iloc[-1]
    said = f"{last['speedup']:.2g}{TIMES} ({last['efficiency']:.0%})"
    return last["world_size"], last["speedup"], f"{line_name(last['scaling'], last['cpus_per_task'])}: {said}", colour


def beside(ax: Axes, table: Mapping) -> Label:
    """A published table, muted, and its label."""
    ranks, speeds = np.array(table["ranks"]), table["seconds"][0] / np.array(table["seconds"])
    ax.plot(ranks, speeds, "s-", color="#AAAAAA", linewidth=1, markersize=4, zorder=1)
    gained = speeds[-1] * ranks[0] / ranks[-1]
    return ranks[-1], speeds[-1], f"{table['name']}: {speeds[-1]:.2g}{TIMES} ({gained:.0%})", "#A0A0A0"


def shares(speedups: pd.DataFrame, left_out: str = "") -> Picture:
    """A bar a setting, from what scaling.speedup gives: the share of its training time that waited for data."""
    rows = speedups.sort_values(["scaling", "cpus_per_task", "world_size"]).dropna(subset="data")
    names = [
        f"{line_name(one.scaling, one.cpus_per_task)}: {counted(one.world_size, one.unit)}" for one in rows.itertuples()
    ]
    figure, ax = plt.subplots(figsize=(WIDTH, 2.2 + 0.36 * len(rows)), layout="constrained")
    parts = {
        "data": (rows["data"], 0, ORANGE),
        "computing, and waiting for ranks": (1 - rows["data"], rows["data"], "#CCCCCC"),
    }
    for part, (share, left, colour) in parts.items():
        bars = ax.barh(range(len(rows)), share, 0.68, left, color=colour, label=part)
        ax.bar_label(bars, [f"{one:.0%}" if one > 0.04 else "" for one in share], label_type="center", color="black")
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="share of the training time of an epoch")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.01, 0.99), fontsize=10)
    title = f"Waiting for data: at most {rows['data'].max():.0%} of the time"
    return captioned(figure, title, speedups["where"].iloc[0], left_out)


def time_cost(per_run: pd.DataFrame, target: float, left_out: str = "") -> Picture:
    """Two dots a setting: seconds to the target accuracy, without start-up, and what the job cost, with it.

    per_run: what scaling.per_run gives for this target (0 to 1). Repeats are joined by a line. Where no run has an
    accuracy, as in a regression, an epoch's seconds stand in the place of those to the target.
    """
    name, hues = unit_of_ranks(per_run), colours(sorted(per_run["world_size"].unique()))
    rows = per_run.assign(cost=3600 * per_run["device_hours"])
    groups = list(rows.groupby(["scaling", "cpus_per_task", "world_size"], dropna=False))
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.2 + 0.36 * len(groups)), sharey=True, layout="constrained")
    scored = per_run["accuracy"].notna().any()
    time, axis = ("to_target", f"seconds to {target:.0%}") if scored else ("seconds", "seconds of an epoch")
    for place, ((*_, ranks), runs) in enumerate(groups):
        for ax, what in zip(axes, (time, "cost"), strict=True):
            ax.plot(runs[what], [place] * len(runs), "o-", color=hues[ranks], linewidth=2, markersize=8)
        if runs[time].isna().all():
            look = {"color": WRONG, "va": "center", "size": 10, "transform": axes[0].get_yaxis_transform()}
            axes[0].text(0.02, place, f"never reached {target:.0%}", **look)
    seconds_axis(axes[0], f"{axis}, without start-up")
    seconds_axis(axes[1], f"{name}-seconds of the job, with start-up")
    labels = [f"{line_name(scaling, cpus)}: {counted(ranks, name)}" for (scaling, cpus, ranks), _ in groups]
    axes[0].set_yticks(range(len(groups)), labels)
    axes[0].invert_yaxis()
    first, least = (
        f"{counted(row['world_size'], name)}, {line_name(row['scaling'], row['cpus_per_task'])}" for row in extremes(rows)
    )
    title = f"Fastest{f' to {target:.0%}' if scored else ''}: {first}. Cheapest: {least}"
    title = title if rows[time].notna().any() else f"No run reached {target:.0%}"
    dots = "a dot a run; repeats are joined; further left is faster, or cheaper"
    return captioned(figure, title, data_and_machine(per_run), dots, left_out)


def seconds_axis(ax: Axes, title: str) -> None:
    """The title and the logarithmic axis of a panel of dots."""
    ax.set_title(title, loc="left")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "2357" else "")
    ax.tick_params(axis="x", which="both", length=3)
    ax.grid(axis="x", which="both", color=drawing.tint(GREY, 0.2))
    ax.set_axisbelow(True)
