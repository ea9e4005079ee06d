"""Loss, accuracy and any other metric by epoch, for every number of ranks and of CPUs per task."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import LABEL, at_the_right, caption, colours, finding
from ddp_helpers.draw.style import GREY, WIDTH
from ddp_helpers.records.scaling import finished, left_out, many, metrics, unit, where

PASSES = {"test": "test", "val": "validation", "train": "training"}
KINDS = {"strong": "the same global batch", "weak": "the same batch per rank"}
LINES = ("-", "--", ":")  # for the numbers of CPUs per task, in ascending order


def curves(table: pd.DataFrame) -> Picture:
    """A panel for each metric, a colour for each number of ranks, a column for strong and for weak.

    Each run is thin, the median thick. Every metric of the records has a panel, whatever its name (scaling.metrics).
    """
    epochs = finished(table).replace([np.inf, -np.inf], np.nan)  # where a run diverged its line has a gap
    kinds, names = sorted(epochs["scaling"].unique()) or ["strong"], metrics(epochs) or ["test_loss"]
    shape = {"figsize": (WIDTH, max(4, 3 * len(names))), "sharex": True, "sharey": "row", "squeeze": False}
    figure, axes = plt.subplots(len(names), len(kinds), layout="constrained", **shape)
    # A colour for each number of ranks; where runs were asked for different things, as in lr, for each of those.
    by = "asked" if epochs["asked"].nunique() > 1 else "world_size"
    hues, name = colours(sorted(epochs[by].unique())), unit(epochs)
    labels: list[tuple[Axes, list[LABEL]]] = []
    for column, kind in enumerate(kinds):
        here = epochs[epochs["scaling"] == kind]
        axes[0, column].set_title(f"{KINDS[kind]} ({kind})" if len(kinds) > 1 else "", loc="left")
        labels += [(ax, lines(ax, here, what, hues, name)) for ax, what in zip(axes[:, column], names, strict=True)]
        axes[-1, column].set_xlabel("epoch")
    for ax, ends in labels:  # now that all panels have their limits
        if not ends:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
        at_the_right(ax, ends, gap=0.09)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for ax, what in zip(axes[:, 0], names, strict=True):
        ax.set_ylabel(words(what))
    title = found(epochs, names)
    finding(figure, title)
    caption(figure, where(epochs), key(epochs, name), left_out(table))
    shown = f"{', '.join(map(words, names))} by epoch, {where(epochs)}"
    return described(figure, f"{title}. {shown[0].upper()}{shown[1:]}.")


def words(metric: str) -> str:
    """A column's name in words, as in test accuracy."""
    first, _, rest = metric.partition("_")
    return f"{PASSES.get(first, first)} {rest.replace('_', ' ')}".strip()


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


def found(epochs: pd.DataFrame, names: list[str]) -> str:
    """The title: how far apart the runs end, in accuracy or else in the first metric, for each kind of scaling."""
    what = next((name for name in names if name.endswith("accuracy")), names[0])
    last = epochs.dropna(subset=[what]).sort_values("epoch").groupby("number").last()
    if last.empty:
        return f"{words(what).capitalize()} by epoch"
    ends, several = last.groupby("scaling")[what].agg(["min", "max"]), last["scaling"].nunique() > 1
    share = what.endswith("accuracy") and ends.max().max() <= 1  # some record 97 for 97 %
    told = []
    for kind, row in ends.iterrows():
        low, high = (f"{value:.1%}" if share else f"{value:.3g}" for value in row)
        reach = low if low == high else f"{low} to {high}"
        told.append(f"{reach} with {KINDS[kind]}" if several else reach)
    begin, end = ("", "" if several else " accuracy") if share else (f"{words(what)} ", "")
    return f"After {many(int(last['epoch'].max()), 'epoch')}: {begin}{', '.join(told)}{end}"


def key(epochs: pd.DataFrame, name: str) -> str:
    """Describe the lines of the figure."""
    cpus = sorted(epochs["cpus_per_task"].dropna().unique())
    styles = zip(("solid", "dashed", "dotted"), cpus, strict=False)
    said = [f"{style}: {many(int(count), 'CPU')} per {name}" for style, count in styles if len(cpus) > 1]
    return "; ".join([*said, *(["thin: each run, thick: their median"] if epochs["number"].nunique() > 1 else [])])
