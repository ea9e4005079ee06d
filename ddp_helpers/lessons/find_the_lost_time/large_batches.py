"""The figure of a large batch's cost in accuracy, and of the learning rate that regains it.

Notebook 12b calls it, in the driver process; it draws from its arguments alone.
"""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, described, tint
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREY, INK, WIDTH


def large_batches(
    accuracy: Mapping[str, Mapping[str, float]],
    factor: int,
    where: str,
) -> Picture:
    """Draw the test accuracy that runs with each optimizer end with.

    accuracy: in per cent, by optimizer and run: the small batch first, then the large one, then
    the large one with remedies. factor: large over small; where: for the caption.
    """
    size = WIDTH, 3.2
    figure, axes = plt.subplots(1, len(accuracy), figsize=size, layout="constrained", sharey=True)
    costs, gains = [], []
    for ax, (optimizer, runs) in zip(axes, accuracy.items(), strict=True):
        small, large, *_ = runs.values()
        remedy = max(list(runs)[2:], key=lambda run: runs[run])
        costs.append(f"{optimizer} {small - large:.0f}")
        gains.append(f"{runs[remedy] - large:.0f}")
        _draw_runs(ax, runs, runs[remedy])
        ax.set_title(f"{optimizer}: best with {remedy}", loc="left")
    axes[0].invert_yaxis()
    title = f"{factor} times the batch costs {' and '.join(costs)} points; "
    title += f"a larger rate regains {' and '.join(gains)}"
    write_title(figure, title)
    write_caption(figure, where)
    texts: list[str] = []
    for optimizer, runs in accuracy.items():
        texts += [f"{optimizer}, {run}: {percent:.1f}" for run, percent in runs.items()]
    return described(figure, f"{title}. Test accuracy in per cent: {'; '.join(texts)}.")


def _draw_runs(ax: Axes, runs: Mapping[str, float], best: float) -> None:
    """Draw a bar for each run of an optimizer: the small batch grey, the best of the large dark."""
    for row, percent in enumerate(runs.values()):
        dark = row == 0 or percent == best
        colour = GREY if row == 0 else tint(BLUE, 1 if dark else 0.35)
        ink = "white" if dark else INK
        ax.barh(row, percent, color=colour)
        ax.text(percent - 2, row, f"{percent:.1f}", ha="right", va="center", color=ink)
    small, *_ = runs.values()
    ax.axvline(small, color=GREY, linewidth=1, linestyle=":")
    ax.set(xlim=(0, 100), xlabel="test accuracy in per cent")
    ax.set(yticks=range(len(runs)), yticklabels=list(runs))
    ax.tick_params(axis="y", length=0)
