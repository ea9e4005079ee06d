"""One training step under DDP, as measured: when gradients were ready, and when they were averaged."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.notebook import style
from ddp_helpers.notebook.picture import Picture, described

style.use()
Note = tuple[str, list[int], float]  # what happened, to which layers, and when (in ms)


def at(notes: Sequence[Note], what: str, layers: Sequence[int] = ()) -> float:
    """When this happened; where it happened several times, when for the last time."""
    return max(ms for name, which, ms in notes if name == what and (not layers or list(which) == list(layers)))


def buckets(notes: Sequence[Note]) -> list[tuple[list[int], float, float]]:
    """For each all-reduce, in the order in which they started: the layers in its bucket, its start and its end."""
    started = [(which, ms) for what, which, ms in notes if what == "all-reduce starts"]
    return [(which, ms, at(notes, "all-reduce ends", which)) for which, ms in started]


def behind_backward(notes: Sequence[Note]) -> float:
    """The share of the time of all all-reduces during which this rank was still computing gradients, 0 to 1."""
    last = at(notes, "gradient ready")
    hidden = sum(max(0.0, min(end, last) - start) for _, start, end in buckets(notes))
    return hidden / sum(end - start for _, start, end in buckets(notes))


def one_step(ranks: Sequence[Sequence[Note]], where: str) -> Picture:
    """Every rank's step as lanes: compute, gradients that become ready, and the all-reduce of each bucket.

    ranks: the notes of each rank. where: the machine they were measured on, for the title.
    """
    rows = len(buckets(ranks[0]))
    figure, axes = plt.subplots(
        len(ranks), figsize=(9.5, 0.9 + len(ranks) * (1.3 + 0.32 * rows)), sharex=True, layout="constrained"
    )
    for rank, (ax, notes) in enumerate(zip(axes, ranks, strict=True)):
        _compute(ax, notes, style.rank_colour(rank))
        _gradients(ax, notes)
        _all_reduces(ax, notes)
        ax.set(ylim=(rows + 1.6, -0.6), yticks=[0, 1, 1.6 + rows / 2])
        ax.set_title(f"rank {rank}", loc="left")
        ax.set_yticklabels(["compute", "gradient\nready", "all-reduce\nof buckets"])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1].set(
        xlabel="time since the start of the step [ms]; hatched: backward waits for the last all-reduces", xlim=(0, None)
    )
    figure.suptitle(f"One step, measured: {where}", fontsize=13, weight="bold")
    early = sum(start < at(ranks[0], "gradient ready") for _, start, _ in buckets(ranks[0]))
    return described(
        figure,
        f"One measured step on {len(ranks)} ranks, as lanes: forward, backward, step; below, when the gradients of "
        f"each layer were ready, from the last layer to the first; below, {rows} all-reduces, one for each bucket. On "
        f"rank 0, {early} of them start before the last gradient is ready, so communication runs during backward.",
    )


def _compute(ax: Axes, notes: Sequence[Note], colour: str) -> None:
    """Forward, backward, and step; within backward, the wait for what is not averaged yet."""
    marks = [at(notes, f"{name} starts") for name in ("forward", "backward", "step")] + [at(notes, "step ends")]
    for begin, end, alpha in zip(marks, marks[1:], (0.3, 0.6, 0.9), strict=False):
        ax.barh(0, end - begin, 0.75, begin, color=colour, alpha=alpha, edgecolor="white", linewidth=1.5)
    ax.text(sum(marks[:2]) / 2, 0, "forward", ha="center", va="center")
    ax.text(marks[3], 0, " step", va="center")
    last = at(notes, "gradient ready")
    ax.text((marks[1] + last) / 2, 0, "backward", ha="center", va="center")
    ax.barh(0, marks[2] - last, 0.75, last, color="none", edgecolor=style.INK, hatch="////", linewidth=0)


def _gradients(ax: Axes, notes: Sequence[Note]) -> None:
    """A tick and a number where all gradients of a layer are ready."""
    for layer in sorted({which[0] for what, which, _ in notes if what == "gradient ready"}):
        ms = at(notes, "gradient ready", [layer])
        ax.plot([ms, ms], [0.55, 0.85], color=style.INK, linewidth=1.6)
        ax.text(ms, 1.15, str(layer), ha="center", va="center", fontsize=10)


def _all_reduces(ax: Axes, notes: Sequence[Note]) -> None:
    """A bar for each bucket's all-reduce, each on a row of its own, since they can overlap."""
    for row, (layers, start, end) in enumerate(buckets(notes)):
        ax.barh(2.1 + row, end - start, 0.7, start, color=style.INK, alpha=0.75)
        name = f"bucket {row}: layers {', '.join(map(str, reversed(layers)))} "
        ax.text(start, 2.1 + row, name, ha="right", va="center", fontsize=10)
