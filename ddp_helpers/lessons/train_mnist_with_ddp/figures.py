"""Figures of notebook 06: the losses of one process and of two, and their difference."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import caption, finding
from ddp_helpers.draw.style import RED, rank_colour

FLOOR = 1e-8  # below it a difference is drawn there: a logarithmic axis has no zero


def proof(losses: Mapping[str, Sequence[float]], apart: Mapping[str, float], control: str, where: str) -> Picture:
    """Draw each run's loss by epoch, and the largest difference of its weights from the first run's.

    control: the name of the run that is meant to differ; it is red.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained", width_ratios=(3, 2))
    colours = {name: RED if name == control else rank_colour(place) for place, name in enumerate(losses)}
    for place, (name, values) in enumerate(losses.items()):
        look = {"color": colours[name], "label": name, "linewidth": 1 + 2.5 * (len(losses) - place - 1)}
        left.plot(range(1, len(values) + 1), values, "--" if name == control else "-", alpha=0.8, **look)
    left.set(xlabel="epoch", ylabel="training loss", xticks=range(1, 1 + max(map(len, losses.values()))))
    left.legend()
    names = list(apart)
    right.barh(names, [max(value, FLOOR) for value in apart.values()], left=FLOOR, color=[colours[n] for n in names])
    right.set(xscale="log", xlim=(FLOOR, 10), xlabel="largest difference of a weight from one process's")
    right.invert_yaxis()
    for row, value in enumerate(apart.values()):
        right.annotate(f"{value:.0e}", (max(value, FLOOR), row), (4, 0), textcoords="offset points", va="center")
    same = max(value for name, value in apart.items() if name != control)
    title = f"The same model to {same:.0e}; with {control} it differs by {apart[control]:.0e}"
    finding(figure, title)
    caption(figure, where)
    said = "; ".join(f"{name}: {', '.join(f'{value:.3f}' for value in values)}" for name, values in losses.items())
    return described(figure, f"Training loss by epoch. {said}. {title}.")
