"""Draw loss, accuracy and all other metrics by epoch, one panel each, from `runs.table`."""

from collections.abc import Hashable
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import Label, at_the_right, captioned
from ddp_helpers.draw.style import GREY, WIDTH, rank_colour
from ddp_helpers.records.scaling import (
    begun,
    counted,
    data_and_machine,
    finished,
    metrics,
    not_done,
    unit_of_ranks,
)

# Words in titles: the data that a metric was measured on, and the kinds of scaling.
_DATA = {"test": "test", "val": "validation", "train": "training"}
_KINDS = {"strong": "the same global batch", "weak": "the same per-rank batch"}


def curves(table: pd.DataFrame) -> Picture:
    """Draw a panel for each metric, a colour for each number of ranks, a column for each scaling.

    Each run is thin, the median thick. If runs differ in a setting, such as lr, each of its
    values has a colour. Every metric of the records has a panel (`scaling.metrics`). A run that is
    not done is drawn up to its last epoch, with its state at the end of its line.
    """
    # Nothing is drawn after a run has diverged.
    epochs = begun(table).replace([np.inf, -np.inf], np.nan)
    scalings = sorted(epochs["scaling"].unique()) or ["strong"]
    names = metrics(epochs) or ["test_loss"]
    figure, axes = plt.subplots(
        len(names),
        len(scalings),
        layout="constrained",
        figsize=(WIDTH, max(4, 3 * len(names))),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    coloured = "asked" if epochs["asked"].nunique() > 1 else "world_size"
    keys = sorted(epochs[coloured].unique())
    by_key: dict[Hashable, str] = {key: rank_colour(place) for place, key in enumerate(keys)}
    unit = unit_of_ranks(epochs)
    labels = []
    for (row, metric), (column, scaling) in product(enumerate(names), enumerate(scalings)):
        ax, runs = axes[row, column], epochs[epochs["scaling"] == scaling]
        labels.append((ax, _draw_panel(ax, runs.dropna(subset=[metric]), metric, by_key, unit)))
        if not column:
            ax.set_ylabel(_name_of(metric))
        if not row and len(scalings) > 1:
            ax.set_title(f"{_KINDS[scaling]} ({scaling})", loc="left")
        if metric == names[-1]:
            ax.set_xlabel("epoch")
    for ax, ends in labels:  # now that all panels have their limits
        _write_labels(ax, ends)
    done = finished(epochs)
    title = _title(epochs if done.empty else done, names)
    lines = "thin: each run, thick: their median" if epochs["number"].nunique() > 1 else ""
    panels = f"{', '.join(map(_name_of, names))} by epoch"
    return captioned(figure, title, data_and_machine(epochs), lines, not_done(table), alt=panels)


def _write_labels(ax: Axes, ends: list[Label]) -> None:
    """Label the lines of a panel at their right ends; without lines, write "not recorded"."""
    if ends:
        at_the_right(ax, ends)
    else:
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _name_of(metric: str) -> str:
    """Return a column's name in words: test accuracy for test_accuracy."""
    data, _, name = metric.partition("_")
    return f"{_DATA.get(data, data)} {name.replace('_', ' ')}".strip()


def _draw_panel(
    ax: Axes,
    epochs: pd.DataFrame,
    metric: str,
    by_key: dict[Hashable, str],
    unit: str,
) -> list[Label]:
    """Draw the runs of one panel, and return a label for each line.

    by_key: the colour of each setting, or else of each number of ranks; unit: what a rank uses.
    """
    labels: list[Label] = []
    for (ranks, setting, state), rows in epochs.groupby(["world_size", "asked", "state"]):
        colour = by_key.get(setting) or by_key[ranks]
        for _, run in rows.groupby("number"):
            ax.plot(run["epoch"], run[metric], color=colour, linewidth=0.7, alpha=0.35)
        median = rows.groupby("epoch")[metric].median()
        ax.plot(median, color=colour, linewidth=2, marker="o", markersize=4)
        text = counted(ranks, unit)
        if setting in by_key and setting:
            text += f", {setting}"
        if state != "done":
            text += f", {state}"
        labels.append((median.index[-1], median.iloc[-1], text, colour))
    ax.margins(y=0.15)  # keeps each label at the right above the axis
    return labels


def _title(epochs: pd.DataFrame, names: list[str]) -> str:
    """Return a title with the range of the runs' last values, for each kind of scaling.

    They are of the accuracy, or else of the first metric.
    """
    metric = next((name for name in names if name.endswith("accuracy")), names[0])
    rows = epochs.dropna(subset=[metric]).sort_values("epoch")
    last = rows.groupby("number").last()
    if last.empty:
        return f"{_name_of(metric).capitalize()} by epoch"
    ends = last.groupby("scaling")[metric].agg(["min", "max"])
    # Some scripts record 97 for 97 %.
    is_share = metric.endswith("accuracy") and ends.max().max() <= 1
    form = ".1%" if is_share else ".3g"
    ranges = []
    for scaling, (low, high) in ends.iterrows():
        first, second = f"{low:{form}}", f"{high:{form}}"
        text = first if first == second else f"{first} to {second}"
        ranges.append(f"{text} with {_KINDS[str(scaling)]}" if len(ends) > 1 else text)
    most = "at most " if last["epoch"].nunique() > 1 else ""
    after = f"After {most}{counted(int(last['epoch'].max()), 'epoch')}"
    if not is_share:
        return f"{after}: {_name_of(metric)} {', '.join(ranges)}"
    return f"{after}: {', '.join(ranges)}{'' if len(ends) > 1 else ' accuracy'}"
