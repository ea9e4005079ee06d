"""Loss and accuracy by epoch, for every number of ranks and of CPUs per task."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_helpers.notebook.drawing import Picture, described
from ddp_helpers.notebook.labels import LABEL, at_the_right, caption, colours, finding
from ddp_helpers.notebook.scaling import finished, left_out, many, unit, where
from ddp_helpers.notebook.style import GREY, WIDTH

ROWS = {"test_loss": "test loss", "test_accuracy": "test accuracy"}
KINDS = {"strong": "the same global batch", "weak": "the same batch per rank"}
LINES = ("-", "--", ":")  # for the numbers of CPUs per task, in ascending order


def curves(table: pd.DataFrame) -> Picture:
    """A colour for each number of ranks, a column for strong and for weak; each run thin, the median thick."""
    epochs = finished(table)
    kinds = sorted(epochs["scaling"].unique()) or ["strong"]
    shape = {"figsize": (WIDTH, 6), "sharex": True, "sharey": "row", "squeeze": False}
    figure, axes = plt.subplots(2, len(kinds), layout="constrained", **shape)
    # A colour for each number of ranks; where runs were asked for different things, as in lr, for each of those.
    by = "asked" if epochs["asked"].nunique() > 1 else "world_size"
    hues, name = colours(sorted(epochs[by].unique())), unit(epochs)
    labels: list[tuple[Axes, list[LABEL]]] = []
    for column, kind in enumerate(kinds):
        here = epochs[epochs["scaling"] == kind]
        axes[0, column].set_title(f"{KINDS[kind]} ({kind})" if len(kinds) > 1 else "", loc="left")
        labels += [(ax, lines(ax, here, what, hues, name)) for ax, what in zip(axes[:, column], ROWS, strict=True)]
        axes[1, column].set_xlabel("epoch")
    for ax, ends in labels:  # now that all panels have their limits
        if not ends:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
        at_the_right(ax, ends, gap=0.09)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for ax, what in zip(axes[:, 0], ROWS.values(), strict=True):
        ax.set_ylabel(what)
    finding(figure, found(epochs))
    caption(figure, where(epochs), key(epochs, name), left_out(table))
    return described(figure, f"{found(epochs)}. Test loss and accuracy by epoch, {where(epochs)}.")


def lines(ax: Axes, epochs: pd.DataFrame, what: str, hues: dict, name: str) -> list[LABEL]:
    """The runs of one panel, and a label for each colour."""
    labels, cpus = {}, sorted(epochs["cpus_per_task"].dropna().unique())
    keys = epochs["world_size"], epochs["asked"], epochs["cpus_per_task"].fillna(cpus[0] if cpus else 0)
    for (ranks, asked, count), rows in epochs.dropna(subset=[what]).groupby(list(keys)):
        hue, own = hues.get(asked) or hues[ranks], f", {asked}" if asked in hues and asked else ""
        line = LINES[min(cpus.index(count), 2)] if cpus else "-"
        runs = [run[["epoch", what]] for _, run in rows.groupby("number")]
        gap = pd.DataFrame({"epoch": [np.nan], what: [np.nan]})  # one line with gaps is drawn faster than many
        thin = np.concatenate([part.to_numpy() for run in runs for part in (run, gap)])
        ax.plot(*thin.T, line, color=hue, linewidth=0.7, alpha=0.35 if len(runs) > 1 else 0)
        median = rows.groupby("epoch")[what].median()
        ax.plot(median, line, color=hue, linewidth=2, marker="o", markersize=4)
        labels.setdefault((ranks, asked), (median.index[-1], median.iloc[-1], f"{many(ranks, name)}{own}", hue))
    return list(labels.values())


def found(epochs: pd.DataFrame) -> str:
    """The title: how far apart the runs end, for each kind of scaling."""
    last = epochs.dropna(subset=["test_accuracy"]).sort_values("epoch").groupby("number").last()
    if last.empty:
        return "Test loss by epoch"
    ends, several = last.groupby("scaling")["test_accuracy"].agg(["min", "max"]), last["scaling"].nunique() > 1
    said = []
    for kind, (low, high) in ends.iterrows():
        reach = f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
        said.append(f"{reach} with {KINDS[kind]}" if several else reach)
    return f"After {many(int(last['epoch'].max()), 'epoch')}: {', '.join(said)}{'' if several else ' accuracy'}"


def key(epochs: pd.DataFrame, name: str) -> str:
    """Describe the lines of the figure."""
    cpus = sorted(epochs["cpus_per_task"].dropna().unique())
    styles = zip(("solid", "dashed", "dotted"), cpus, strict=False)
    said = [f"{style}: {many(int(count), 'CPU')} per {name}" for style, count in styles if len(cpus) > 1]
    return "; ".join([*said, *(["thin: each run, thick: their median"] if epochs["number"].nunique() > 1 else [])])
