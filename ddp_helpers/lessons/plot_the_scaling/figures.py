"""Draw the figures of notebook 09: strong and weak scaling, speed-up, shares of the time, cost.

The notebook calls them in its own process, on the tables of `records.scaling`.
"""

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

_PUBLISHED_LINE, _PUBLISHED_LABEL = "#AAAAAA", "#A0A0A0"


def strong_and_weak(counts: Sequence[int] = (1, 2, 4), batch: int = 8) -> Picture:
    """Draw a step on 1, 2 and 4 ranks, with strong and with weak scaling.

    A brick is an image, a column is a rank, and its height the work of that rank.
    batch: images of a step on one rank.
    """
    title = "Strong: a step gets shorter. Weak: a step does more."
    ax = drawing.canvas(4.3, title)
    rows = (
        (2.0, "strong", "the same\nglobal batch"),
        (3.95, "weak", "the same\nbatch per rank"),
    )
    parts = drawing.equal_parts(1.9, WIDTH - 0.1, len(counts), gap=0.3)
    for floor, scaling, kept in rows:
        drawing.write_text(ax, LEFT, floor - 1.1, scaling, ha="left", weight="bold")
        drawing.write_text(ax, LEFT, floor - 0.8, kept, ha="left")
        for ranks, (left, _) in zip(counts, parts, strict=True):
            per_rank = batch // ranks if scaling == "strong" else batch
            _draw_bricks(ax, left, floor, ranks, per_rank)
            label = f"{counted(ranks, 'rank')}: {per_rank * ranks} images a step"
            drawing.write_text(ax, left, floor + 0.18, label, ha="left", size=10.5)
    figure = ax.get_figure(root=True)
    assert figure is not None
    return drawing.described(figure, f"Bricks, an image each, a column a rank. {title}")


def _draw_bricks(ax: Axes, left: float, floor: float, ranks: int, per_rank: int) -> None:
    """Draw a column of bricks for each rank, from the floor up."""
    for rank in range(ranks):
        for brick in range(per_rank):
            corner = (left + 0.5 * rank, floor - 0.16 * (brick + 1))
            drawing.box(ax, corner, (0.44, 0.14), "", rank_colour(rank), fill=0.5)


def speedup(
    speedups: pd.DataFrame,
    published: Sequence[Mapping] = (),
    left_out: str = "",
) -> Picture:
    """Draw the speed-up of each setting with its spread, beside published tables, muted.

    speedups: what scaling.speedup gives. published: tables of published.json, each with name, ranks
    and seconds. left_out: for the caption.
    """
    unit, base = speedups["unit"].iloc[0], speedups["base"].min()
    counts = list(speedups["world_size"])
    for table in published:
        counts += table["ranks"]
    figure, ax = plt.subplots(figsize=(WIDTH, 5.2), layout="constrained")
    scale_ranks_axis(ax, counts, unit)
    settings = list(speedups.groupby(["scaling", "cpus_per_task"], dropna=False))
    labels = [_draw_published(ax, table) for table in published]
    for index, (_, rows) in enumerate(settings):
        if len(rows) > 1:
            labels.append(_draw_setting(ax, rows, rank_colour(index)))

    most = max(counts)
    ax.plot([base, most], [1, most / base], ":", color=INK, linewidth=1.2, zorder=0)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel(f"times as fast as {counted(base, unit)}")
    at_the_right(ax, [*labels, (most, most / base, "ideal", INK)], gap=0.055)

    best = speedups.loc[speedups["speedup"].idxmax()]
    fastest = counted(best["world_size"], unit)
    title, muted = f"At best {best['speedup']:.1f} times as fast, on {fastest}", ""
    if published:
        gain, ranks = max(map(_published_gain, published))
        title += f"; published: {gain:.0f} times, on {ranks} GPUs"
        muted = "grey: published, on other machines, each against its own first size"
    bars = "bars: lowest to highest repeat; in brackets: efficiency"
    single = ", ".join(line_name(*setting) for setting, rows in settings if len(rows) == 1)
    alone = f"one size only: {single}" if single else ""
    return captioned(figure, title, speedups["where"].iloc[0], bars, muted, alone, left_out)


def _published_gain(table: Mapping) -> tuple[float, int]:
    """Return how many times as fast a published table's last size is, and its ranks."""
    return table["seconds"][0] / table["seconds"][-1], table["ranks"][-1]


def _draw_setting(ax: Axes, rows: pd.DataFrame, colour: str) -> Label:
    """Draw the line of a setting with its spread; return its label."""
    ends = rows[["speedup_low", "speedup_high"]].sub(rows["speedup"], axis=0)
    spread = np.abs(ends.to_numpy().T)
    x, y = rows["world_size"], rows["speedup"]
    ax.errorbar(x, y, spread, fmt="o-", color=colour, linewidth=2.5, capsize=4, zorder=3)
    last = rows.iloc[-1]
    name = line_name(last["scaling"], last["cpus_per_task"])
    text = f"{name}: {last['speedup']:.2g}{TIMES} ({last['efficiency']:.0%})"
    return last["world_size"], last["speedup"], text, colour


def _draw_published(ax: Axes, table: Mapping) -> Label:
    """Draw the line of a published table, muted; return its label."""
    ranks, seconds = np.array(table["ranks"]), np.array(table["seconds"])
    speeds = seconds[0] / seconds
    ax.plot(ranks, speeds, "s-", color=_PUBLISHED_LINE, linewidth=1, markersize=4, zorder=1)
    efficiency = speeds[-1] * ranks[0] / ranks[-1]
    text = f"{table['name']}: {speeds[-1]:.2g}{TIMES} ({efficiency:.0%})"
    return ranks[-1], speeds[-1], text, _PUBLISHED_LABEL


def shares(speedups: pd.DataFrame, left_out: str = "") -> Picture:
    """Draw a bar for each setting: the share of its training time that waited for data.

    speedups: what scaling.speedup gives. left_out: for the caption.
    """
    rows = speedups.sort_values(["scaling", "cpus_per_task", "world_size"]).dropna(subset="data")
    settings = zip(rows["scaling"], rows["cpus_per_task"], rows["world_size"], strict=True)
    unit = speedups["unit"].iloc[0]
    names = [f"{line_name(kind, cpus)}: {counted(ranks, unit)}" for kind, cpus, ranks in settings]
    size = WIDTH, 2.2 + 0.36 * len(rows)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    data = rows["data"].to_numpy()
    _draw_shares(ax, data, np.zeros(len(data)), ORANGE, "data")
    _draw_shares(ax, 1 - data, data, "#CCCCCC", "computing, and waiting for ranks")
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="share of the training time of an epoch")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.01, 0.99), fontsize=10)
    title = f"Waiting for data: at most {rows['data'].max():.0%} of the time"
    return captioned(figure, title, speedups["where"].iloc[0], left_out)


def _draw_shares(ax: Axes, share: np.ndarray, left: np.ndarray, colour: str, part: str) -> None:
    """Draw a part of each bar, from `left` on, with its per cent where there is room."""
    bars = ax.barh(range(len(share)), share, 0.68, left, color=colour, label=part)
    texts = [f"{width:.0%}" if width > 0.04 else "" for width in share]
    ax.bar_label(bars, texts, label_type="center", color="black")


def time_cost(per_run: pd.DataFrame, target: float, left_out: str = "") -> Picture:
    """Draw for each setting the seconds to the target accuracy, and what the job cost.

    The seconds are without start-up, the cost with it; repeats are joined by a line. Where no run
    has an accuracy, as in a regression, the seconds are those of an epoch.

    per_run: what scaling.per_run gives for this target (0 to 1). left_out: for the caption.
    """
    unit = unit_of_ranks(per_run)
    hues = colours(sorted(per_run["world_size"].unique()))
    rows = per_run.assign(cost=3600 * per_run["device_hours"])
    groups = list(rows.groupby(["scaling", "cpus_per_task", "world_size"], dropna=False))
    size = WIDTH, 2.2 + 0.36 * len(groups)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    scored = per_run["accuracy"].notna().any()
    time, axis = "seconds", "seconds of an epoch"
    if scored:
        time, axis = "to_target", f"seconds to {target:.0%}"

    labels = []
    for row, ((scaling, cpus, ranks), runs) in enumerate(groups):
        labels.append(f"{line_name(scaling, cpus)}: {counted(ranks, unit)}")
        for ax, column in ((left, time), (right, "cost")):
            y = [row] * len(runs)
            ax.plot(runs[column], y, "o-", color=hues[ranks], linewidth=2, markersize=8)
        if runs[time].isna().all():
            edge, text = left.get_yaxis_transform(), f"never reached {target:.0%}"
            left.text(0.02, row, text, color=WRONG, va="center", size=10, transform=edge)

    _scale_seconds_axis(left, f"{axis}, without start-up")
    _scale_seconds_axis(right, f"{unit}-seconds of the job, with start-up")
    left.set_yticks(range(len(groups)), labels)
    left.invert_yaxis()
    title = f"No run reached {target:.0%}"
    if rows[time].notna().any():
        fastest, cheapest = (_setting_name(run, unit) for run in extremes(rows))
        goal = f" to {target:.0%}" if scored else ""
        title = f"Fastest{goal}: {fastest}. Cheapest: {cheapest}"
    dots = "a dot a run; repeats are joined; further left is faster, or cheaper"
    return captioned(figure, title, data_and_machine(per_run), dots, left_out)


def _setting_name(run: pd.Series, unit: str) -> str:
    """Name the setting of a run: its ranks, its scaling and the CPUs of each rank."""
    name = line_name(run["scaling"], run["cpus_per_task"])
    return f"{counted(run['world_size'], unit)}, {name}"


def _scale_seconds_axis(ax: Axes, title: str) -> None:
    """Give a panel of dots its title and a logarithmic axis."""
    ax.set_title(title, loc="left")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_formatter(_minor_tick)
    ax.tick_params(axis="x", which="both", length=3)
    ax.grid(axis="x", which="both", color=drawing.tint(GREY, 0.2))
    ax.set_axisbelow(True)


def _minor_tick(value: float, _position: float) -> str:
    """Write a minor tick that begins with 2, 3, 5 or 7; leave the others empty."""
    return f"{value:g}" if f"{value:.0e}"[0] in "2357" else ""
