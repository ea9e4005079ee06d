"""Accuracy by epoch, and where the seconds of an epoch went, for some runs."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.notebook import style
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.runs import Run


def name(run: Run) -> str:
    """What tells a run from the others."""
    return f"{run.folder.name}\n{run.env['launcher']}, {run.env['world_size']} ranks"


def accuracy_and_seconds(runs: list[Run]) -> Picture:
    """Left: test accuracy after each epoch. Right: the seconds of the last epoch, by what they went into."""
    style.use()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 1.6 + 0.7 * len(runs)), layout="constrained")
    for number, run in enumerate(runs):
        epochs, scores = [e["epoch"] for e in run.epochs], [100 * e["test_accuracy"] for e in run.epochs]
        left.plot(epochs, scores, "o-", color=style.rank_colour(number), label=name(run).replace("\n", ": "))
    left.set(
        title=f"Test accuracy, {runs[0].env['dataset']}", xlabel="epoch", ylabel="per cent", xmargin=0.2, ymargin=0.4
    )
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(loc="lower center", fontsize=10)
    bars(right, runs)
    parts = "; ".join(f"{name(run)}: {run.epochs[-1]['seconds']:.1f} s of training" for run in runs).replace("\n", ", ")
    return described(figure, f"Test accuracy by epoch, and the seconds of the last epoch. {parts}.")


def bars(ax: Axes, runs: list[Run]) -> None:
    """A bar a run: waiting for data, steps, evaluation."""
    for number, run in enumerate(runs):
        last, begin = run.epochs[-1], 0.0
        parts = {
            "data": last["data_seconds"],
            "steps": last["seconds"] - last["data_seconds"],
            "test": last["test_seconds"],
        }
        for (part, seconds), colour in zip(parts.items(), (style.RED, style.BLUE, style.GREY), strict=True):
            ax.barh(number, seconds, left=begin, color=colour, label=part if number == 0 else None)
            begin += seconds
    ax.set(
        title="Where an epoch's seconds went", xlabel="seconds", yticks=range(len(runs)), yticklabels=map(name, runs)
    )
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3, fontsize=10)
