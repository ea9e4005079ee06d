"""Draw loss, accuracy and any other metric by epoch, a panel each, for all sizes of runs.

Notebook 09, job.ipynb and the command `curve` call it, in one process, on a table of `runs.table`.
"""

from collections.abc import Hashable

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import Label, at_the_right, colours, write_caption, write_title
from ddp_helpers.draw.style import GREY, WIDTH
from ddp_helpers.records.scaling import (
    begun,
    counted,
    data_and_machine,
    finished,
    metrics,
    not_done,
    unit_of_ranks,
)

# How a title calls the data that a metric was measured on, and the kinds of scaling.
_DATA = {"test": "test", "val": "validation", "train": "training"}
_KINDS = {"strong": "the same global batch", "weak": "the same batch per rank"}
# Of the numbers of CPUs per task, in ascending order.
_LINES = ("-", "--", ":")
_LINE_NAMES = ("solid", "dashed", "dotted")

_Colours = dict[Hashable, str]


def curves(table: pd.DataFrame) -> Picture:
    """Draw a panel for each metric, a colour for each number of ranks, a column for each scaling.

    Each run is thin, the median thick. Where runs differ in a setting, such as lr, each of its
    values has a colour. Every metric of the records has a panel (`scaling.metrics`). A run that is
    not done is drawn as far as it came; its state stands at its line.
    """
    # Where a run diverged its line has a gap.
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
    by_key: _Colours = colours(sorted(epochs[coloured].unique()))
    rank_unit = unit_of_ranks(epochs)
    labels: list[tuple[Axes, list[Label]]] = []
    for column, scaling in enumerate(scalings):
        runs = epochs[epochs["scaling"] == scaling]
        heading = f"{_KINDS[scaling]} ({scaling})" if len(scalings) > 1 else ""
        axes[0, column].set_title(heading, loc="left")
        axes[-1, column].set_xlabel("epoch")
        for ax, metric in zip(axes[:, column], names, strict=True):
            labels.append((ax, _draw_panel(ax, runs, metric, by_key, rank_unit)))
            ax.margins(y=0.15)  # so that no label at the right stands below the axis
    for ax, ends in labels:  # now that all panels have their limits
        if not ends:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
        at_the_right(ax, ends, gap=0.09)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for ax, metric in zip(axes[:, 0], names, strict=True):
        ax.set_ylabel(_name_of(metric))
    done = finished(epochs)
    title = _title(epochs if done.empty else done, names)
    write_title(figure, title)
    states = not_done(table)
    write_caption(figure, data_and_machine(epochs), _line_styles(epochs, rank_unit), states)
    contents = f"{', '.join(map(_name_of, names))} by epoch, {data_and_machine(epochs)}"
    contents += f"; {states}" if states else ""
    return described(figure, f"{title}. {contents[0].upper()}{contents[1:]}.")


def _name_of(metric: str) -> str:
    """Return a column's name as a page writes it: test accuracy for test_accuracy."""
    data, _, name = metric.partition("_")
    return f"{_DATA.get(data, data)} {name.replace('_', ' ')}".strip()


def _draw_panel(
    ax: Axes,
    epochs: pd.DataFrame,
    metric: str,
    by_key: _Colours,
    rank_unit: str,
) -> list[Label]:
    """Draw the runs of one panel, and return a label for each line.

    by_key: the colour of each setting, or else of each number of ranks.
    """
    labels: dict[tuple[Hashable, ...], Label] = {}
    cpus = sorted(epochs["cpus_per_task"].dropna().unique())
    cpus_or_fewest = epochs["cpus_per_task"].fillna(cpus[0] if cpus else 0)
    keys = [epochs["world_size"], epochs["asked"], epochs["state"], cpus_or_fewest]
    for (ranks, setting, state, count), rows in epochs.dropna(subset=[metric]).groupby(keys):
        colour = by_key.get(setting) or by_key[ranks]
        line = _LINES[min(cpus.index(count), 2)] if cpus else "-"
        _draw_runs(ax, rows, metric, line, colour)
        median = rows.groupby("epoch")[metric].median()
        ax.plot(median, line, color=colour, linewidth=2, marker="o", markersize=4)
        text = counted(ranks, rank_unit)
        if setting in by_key and setting:
            text += f", {setting}"
        if state != "done":
            text += f", {state}"
        end = median.index[-1], median.iloc[-1]
        labels.setdefault((ranks, setting, state), (*end, text, colour))
    return list(labels.values())


def _draw_runs(ax: Axes, rows: pd.DataFrame, metric: str, line: str, colour: str) -> None:
    """Draw the repeats of one setting, thin; a single run is not seen behind its median."""
    runs = [run[["epoch", metric]] for _, run in rows.groupby("number")]
    # One line with gaps is drawn faster than many.
    gap = pd.DataFrame({"epoch": [np.nan], metric: [np.nan]})
    points = np.concatenate([part.to_numpy() for run in runs for part in (run, gap)])
    alpha = 0.35 if len(runs) > 1 else 0
    ax.plot(points[:, 0], points[:, 1], line, color=colour, linewidth=0.7, alpha=alpha)


def _title(epochs: pd.DataFrame, names: list[str]) -> str:
    """Say how far apart the runs end, for each kind of scaling.

    In accuracy, or else in the first metric.
    """
    metric = next((name for name in names if name.endswith("accuracy")), names[0])
    rows = epochs.dropna(subset=[metric]).sort_values("epoch")
    last = rows.groupby("number").last()
    if last.empty:
        return f"{_name_of(metric).capitalize()} by epoch"
    ends = last.groupby("scaling")[metric].agg(["min", "max"])
    # Some record 97 for 97 %.
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


def _line_styles(epochs: pd.DataFrame, rank_unit: str) -> str:
    """Describe the lines of the figure; '' if they are all alike."""
    cpus = sorted(epochs["cpus_per_task"].dropna().unique())
    styles = []
    if len(cpus) > 1:
        for style, count in zip(_LINE_NAMES, cpus, strict=False):
            styles.append(f"{style}: {counted(int(count), 'CPU')} per {rank_unit}")
    if epochs["number"].nunique() > 1:
        styles.append("thin: each run, thick: their median")
    return "; ".join(styles)
