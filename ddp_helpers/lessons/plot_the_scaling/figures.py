"""Draw the figures of notebook 09: speed-up, the four parts of the time, cost.

The notebook calls them in its own process, on the tables of `records.scaling`.
"""

from collections.abc import Iterable, Mapping, Sequence

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
from ddp_helpers.draw.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    RED,
    TIMES,
    WIDTH,
    WRONG,
    rank_colour,
)
from ddp_helpers.lessons.plot_the_scaling.advice import EQUAL, extremes, noise
from ddp_helpers.records.scaling import (
    counted,
    data_and_machine,
    unit_of_price,
    unit_of_ranks,
)

# Where a rank's seconds go: it loads, computes, waits for late ranks, and exchanges gradients.
PARTS = {"data": ORANGE, "compute": BLUE, "wait": "#CCCCCC", "exchange": RED}
_PUBLISHED_LINE, _PUBLISHED_LABEL = "#AAAAAA", "#A0A0A0"


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

    best = [_best_gain(rows, unit) for _, rows in speedups.groupby("scaling")]
    title, muted = f"At best {', '.join(best)}", ""
    if published:
        gain, ranks = max(map(_published_gain, published))
        title += f"; published: {gain:.0f} times on {ranks} GPUs"
        muted = "grey: published, on other machines, each against its own first size"
    bars = "bars: lowest to highest repeat; in brackets: efficiency"
    single = ", ".join(line_name(*setting) for setting, rows in settings if len(rows) == 1)
    alone = f"one size only: {single}" if single else ""
    return captioned(figure, title, speedups["where"].iloc[0], bars, muted, alone, left_out)


def _best_gain(rows: pd.DataFrame, unit: str) -> str:
    """Write the largest speed-up of one scaling, and its ranks."""
    best = rows.loc[rows["speedup"].idxmax()]
    return f"{best['speedup']:.1f} times on {counted(best['world_size'], unit)} ({best['scaling']})"


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


def parts_by_size(seconds: Mapping[int, Sequence[float]], steps: str) -> Picture:
    """Draw where the seconds of rank 0 go, a bar for each number of ranks.

    seconds: by the number of ranks, the four numbers of PARTS. steps: for the caption.
    """
    rows = {counted(size, "rank"): values for size, values in seconds.items()}
    _, compute, _, exchange = zip(*seconds.values(), strict=True)
    title = f"On {_series(seconds, '{}')} ranks: computing takes {_series(compute)} s, "
    title += f"the exchange {_series(exchange)} s"
    return _stacked(rows, title, f"rank 0, {steps}")


def parts_by_rank(seconds: Mapping[str, Sequence[Sequence[float]]], steps: str) -> Picture:
    """Draw where the seconds of each rank go, in each of several runs.

    seconds: by the name of a run, for each rank the four numbers of PARTS. steps: for the caption.
    """
    rows: dict[str, Sequence[float]] = {}
    for name, ranks in seconds.items():
        rows |= {f"{name}: rank {rank}": values for rank, values in enumerate(ranks)}
    *_, (name, last) = seconds.items()
    waits = [f"rank {rank} waits {wait:.1f} s" for rank, (_, _, wait, _) in enumerate(last)]
    return _stacked(rows, f"{name}: {', '.join(waits)}", f"every rank, {steps}")


def _series(numbers: Iterable[float], form: str = "{:.1f}") -> str:
    """Write numbers one after the other, as in 1.0, 0.5, 0.6."""
    return ", ".join(map(form.format, numbers))


def _stacked(seconds: Mapping[str, Sequence[float]], title: str, caption: str) -> Picture:
    """Draw a bar for each row: the seconds of PARTS, one behind the other."""
    names, values = list(seconds), np.array(list(seconds.values()))
    size = WIDTH, 2.1 + 0.42 * len(names)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    starts = np.cumsum(values, axis=1) - values
    longest = values.sum(axis=1).max()
    for (part, colour), width, left in zip(PARTS.items(), values.T, starts.T, strict=True):
        bars = ax.barh(range(len(names)), width, 0.68, left, color=colour, label=part)
        texts = [f"{second:.2f}" if second > 0.06 * longest else "" for second in width]
        text_colour = "white" if colour == BLUE else "black"
        ax.bar_label(bars, texts, label_type="center", color=text_colour)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("seconds")
    ax.tick_params(axis="y", length=0)
    ax.legend(ncols=len(PARTS), loc="lower left", bbox_to_anchor=(-0.01, 0.99), fontsize=10)
    return captioned(figure, title, caption)


def time_cost(per_run: pd.DataFrame, target: float, left_out: str = "") -> Picture:
    """Draw for each setting the seconds to the target accuracy, and what the job cost.

    The seconds are without start-up, the cost with it; the runs of a setting are joined by a line,
    and its median is a bar. What is within the noise of the best is grey. Where no run has an
    accuracy, as in a regression, the seconds are those of an epoch.

    per_run: what scaling.per_run gives for this target (0 to 1). left_out: for the caption.
    """
    unit, price_unit = unit_of_ranks(per_run), unit_of_price(per_run)
    hues = colours(sorted(per_run["world_size"].unique()))
    rows = per_run.assign(cost=3600 * per_run["device_hours"])
    groups = [runs for _, runs in rows.groupby(EQUAL, dropna=False)]
    size = WIDTH, 2.2 + 0.36 * len(groups)
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    scored = per_run["accuracy"].notna().any()
    time, axis = "seconds", "seconds of an epoch"
    if scored:
        time, axis = "to_target", f"seconds to {target:.0%}"

    labels = []
    for row, runs in enumerate(groups):
        scaling, ranks = " or ".join(sorted(runs["scaling"].unique())), runs["world_size"].iloc[0]
        name = line_name(scaling, runs["cpus_per_task"].iloc[0])
        labels.append(f"{name}: {counted(ranks, unit)}")
        for ax, column in ((left, time), (right, "cost")):
            y = [row] * len(runs)
            ax.plot(runs[column], y, "o-", color=hues[ranks], linewidth=2, markersize=7)
            ax.plot(runs[column].median(), row, "|", color=INK, markersize=16, markeredgewidth=2)
        if runs[time].isna().all():
            edge, text = left.get_yaxis_transform(), f"never reached {target:.0%}"
            left.text(0.02, row, text, color=WRONG, va="center", size=10, transform=edge)

    fastest, cheapest = extremes(per_run)
    apart = np.nan_to_num(noise(per_run))
    title = f"No run reached {target:.0%}"
    if rows[time].notna().any():
        goal = f" to {target:.0%}" if scored else ""
        title = f"Fastest{goal}: {_names(fastest)}. Cheapest: {_names(cheapest)}"
        if not scored or np.isfinite(fastest[time]).all():
            _shade_noise(left, fastest[time].iloc[0], apart)
            _shade_noise(right, 3600 * cheapest["device_hours"].iloc[0], apart)
    _scale_seconds_axis(left, f"{axis}, without start-up")
    _scale_seconds_axis(right, f"{price_unit}-seconds of the job, with start-up")
    left.set_yticks(range(len(groups)), labels)
    left.invert_yaxis()
    dots = "a dot a run, a bar the median of a row; further left is faster, or cheaper"
    grey = f"grey: within {apart:.0%} of the best, as far as equal jobs lie apart" if apart else ""
    where = data_and_machine(per_run)
    return captioned(figure, title, where, "logarithmic scales", dots, grey, left_out)


def _names(settings: pd.DataFrame) -> str:
    """Name the best setting; where others are within its noise, all of them."""
    return " or, within the noise, ".join(settings["name"])


def _shade_noise(ax: Axes, best: float, apart: float) -> None:
    """Shade what equal jobs lie apart, from the best on."""
    if apart:
        ax.axvspan(best, best * (1 + apart), color=drawing.tint(GREY, 0.25), linewidth=0, zorder=0)


def _scale_seconds_axis(ax: Axes, title: str) -> None:
    """Give a panel of dots its title and a logarithmic axis."""
    ax.set_title(title, loc="left")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = ax.get_xlim()
    digits = "25" if high > 10 * low else "2357"
    ax.xaxis.set_minor_formatter(
        lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in digits else ""
    )
    ax.tick_params(axis="x", which="both", length=3)
    ax.grid(axis="x", which="both", color=drawing.tint(GREY, 0.2))
    ax.set_axisbelow(True)
