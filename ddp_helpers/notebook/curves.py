"""Loss and accuracy by epoch, for every number of ranks and of CPUs per task."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_helpers.notebook.drawing import GREY, Picture, described
from ddp_helpers.notebook.labels import LABEL, at_the_right, caption, colours, setting
from ddp_helpers.notebook.scaling import finished, left_out, many, unit, where

ROWS = {"test_loss": "test loss", "test_accuracy": "test accuracy"}
LINES = {"strong": "-", "weak": "--"}


def curves(table: pd.DataFrame) -> Picture:
    """A colour for each number of ranks, a column for each number of CPUs per task; each run thin, the median thick."""
    epochs = finished(table)
    cpus = sorted(epochs["cpus_per_task"].unique(), key=lambda count: (pd.isna(count), count)) or [np.nan]
    shape = {"figsize": (max(7.5, 2 + 4 * len(cpus)), 6.6), "sharex": True, "sharey": "row", "squeeze": False}
    figure, axes = plt.subplots(2, len(cpus), layout="constrained", **shape)
    # A colour for each number of ranks; where runs were asked for different things, as in lr, for each of those.
    by = "asked" if epochs["asked"].nunique() > 1 else "world_size"
    hues, name = colours(sorted(epochs[by].unique())), unit(epochs)
    labels: list[tuple[Axes, list[LABEL]]] = []
    for column, count in enumerate(cpus):
        here = epochs[epochs["cpus_per_task"].isna() if pd.isna(count) else epochs["cpus_per_task"].eq(count)]
        axes[0, column].set_title("CPUs not recorded" if pd.isna(count) else f"{many(int(count), 'CPU')} per {name}")
        labels += [(ax, lines(ax, here, what, hues, name)) for ax, what in zip(axes[:, column], ROWS, strict=True)]
        axes[1, column].set_xlabel("epoch")
    for ax, ends in labels:  # now that all panels have their limits
        if not ends:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
        at_the_right(ax, ends)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for ax, what in zip(axes[:, 0], ROWS.values(), strict=True):
        ax.set_ylabel(what)
    figure.suptitle(where(epochs), fontsize=12)
    caption(figure, key(epochs), left_out(table))
    return described(figure, f"Test loss and accuracy by epoch, {where(epochs)}. {told(epochs, name)}")


def lines(ax: Axes, epochs: pd.DataFrame, what: str, hues: dict, name: str) -> list[LABEL]:
    """The runs of one panel, and the labels of their medians."""
    labels = []
    for (scaling, ranks, asked), rows in epochs.dropna(subset=[what]).groupby(["scaling", "world_size", "asked"]):
        hue, own = hues.get(asked) or hues[ranks], f", {asked}" if asked in hues and asked else ""
        runs = [run[["epoch", what]] for _, run in rows.groupby("number")]
        gap = pd.DataFrame({"epoch": [np.nan], what: [np.nan]})  # one line with gaps is drawn faster than many
        thin = np.concatenate([part.to_numpy() for run in runs for part in (run, gap)])
        ax.plot(*thin.T, LINES[scaling], color=hue, linewidth=0.7, alpha=0.35 if len(runs) > 1 else 0)
        median = rows.groupby("epoch")[what].median()
        ax.plot(median, LINES[scaling], color=hue, linewidth=2, marker="o", markersize=4)
        weak = ", weak" if scaling == "weak" and epochs["scaling"].nunique() > 1 else ""
        labels.append((median.index[-1], median.iloc[-1], f"{many(ranks, name)}{weak}{own}", hue))
    return labels


def key(epochs: pd.DataFrame) -> str:
    """Describe the lines of the figure."""
    weak = "dashed: the same batch per rank, solid: the same global batch" if epochs["scaling"].nunique() > 1 else ""
    thin = "thin: each run, thick: their median" if epochs.groupby("number").ngroups > 1 else ""
    return "; ".join(filter(None, (thin, weak)))


def told(epochs: pd.DataFrame, name: str) -> str:
    """Describe the last values of each number of ranks, for the alt text."""
    last = epochs.sort_values("epoch").groupby("number").last()
    keys = last["cpus_per_task"].fillna(0), last["scaling"], last["world_size"], last["asked"]
    ends = last.groupby(list(keys))[list(ROWS)].median()
    said = []
    for (cpus, scaling, ranks, asked), row in ends.iterrows():
        how = ", ".join(filter(None, (setting(scaling, cpus or np.nan), asked)))
        loss, accuracy = f"loss {row['test_loss']:.3f}", f"accuracy {row['test_accuracy']:.1%}"
        numbers = ", ".join(number for number in (loss, accuracy) if "nan" not in number)
        said.append(f"{many(ranks, name)} ({how}): {numbers}")
    return f"After the last epoch, medians: {'; '.join(said)}."
