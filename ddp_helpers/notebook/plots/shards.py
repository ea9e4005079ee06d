"""What a larger global batch does to the loss of one epoch, with and without a larger learning rate."""

from collections.abc import Sequence

import matplotlib.pyplot as plt

from ddp_helpers.notebook import style
from ddp_helpers.notebook.picture import Picture, described


def learning_rates(
    ranks: Sequence[int], steps: Sequence[int], same: Sequence[float], scaled: Sequence[float]
) -> Picture:
    """Loss after one epoch for each number of ranks: with the same learning rate, and with one times the ranks."""
    style.use()
    figure, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
    places, what = range(len(ranks)), (("the same learning rate", same), ("learning rate times ranks", scaled))
    for (label, losses), colour in zip(what, (style.RED, style.BLUE), strict=True):
        ax.plot(places, losses, "o-", color=colour)
        ax.annotate(label, (len(ranks) - 1, losses[-1]), (-8, 10), textcoords="offset points", ha="right", color=colour)
    ax.set(
        title="Toy regression, one epoch, the same batch per rank",
        xticks=places,
        xticklabels=[f"{count}\n{taken} steps" for count, taken in zip(ranks, steps, strict=True)],
        xlabel="ranks, and optimizer steps in the epoch",
        ylabel="mean squared error after the epoch",
        ylim=(0, 1.12 * max(*same, *scaled)),
    )
    ends = "; ".join(
        f"{count} rank{'s' * (count > 1)}, {taken} steps: {one:.2f} with the same, {other:.2f} with {count} times it"
        for count, taken, one, other in zip(ranks, steps, same, scaled, strict=True)
    )
    return described(
        figure,
        f"Mean squared error of the toy after one epoch, by number of ranks, learning rate the same or scaled. {ends}.",
    )
