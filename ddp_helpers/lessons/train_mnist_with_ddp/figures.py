"""The figure of notebook 06: what one process and several get right, and how far weights differ.

The notebook calls it, in its own process, with what the runs recorded.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import RED, WIDTH, rank_colour


def proof(
    right: Mapping[str, Sequence[int]],
    differences: Mapping[str, float],
    control: str,
    where: str,
) -> Picture:
    """Draw each run's right answers by epoch, and how far its weights are from the first's.

    right and differences: by the name of a run; the first run is the reference, which has no
    difference. control: the run that is meant to differ, in red. where: for the caption.
    """
    size, ratios = (WIDTH, 3.6), (2, 1)
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained", width_ratios=ratios)
    colours = {name: rank_colour(number) for number, name in enumerate(right)}
    colours[control] = RED
    _draw_right_answers(axes[0], right, colours, control)
    _write_differences(axes[1], differences, colours)
    alone, *others = [name for name in right if name != control]
    names = f"{', '.join(others[:-1])} and {others[-1]}"
    title = f"{names} learn the model of {alone}; {control}: another one"
    write_title(figure, title)
    write_caption(figure, where)
    texts = [f"{name}: {', '.join(map(str, values))}" for name, values in right.items()]
    apart = ", ".join(f"{name} {value:.0e}" for name, value in differences.items())
    return described(
        figure, f"Right answers by epoch. {'; '.join(texts)}. {title}. Weights differ by: {apart}."
    )


def _draw_right_answers(
    ax: Axes,
    right: Mapping[str, Sequence[int]],
    colours: Mapping[str, str],
    control: str,
) -> None:
    """Draw a curve for each run, a later one thinner than those below it; the control dashed."""
    for number, (name, values) in enumerate(right.items()):
        ax.plot(
            range(1, len(values) + 1),
            values,
            "--" if name == control else "-",
            alpha=0.8,
            color=colours[name],
            label=name,
            linewidth=1 + 2 * (len(right) - number - 1),
        )
    epochs = max(map(len, right.values()))
    ax.set(xlabel="epoch", ylabel="right answers", xticks=range(1, 1 + epochs))
    ax.legend(loc="upper left", fontsize="small", labelspacing=0.3, bbox_to_anchor=(0.0, 1.03))


def _write_differences(
    ax: Axes,
    differences: Mapping[str, float],
    colours: Mapping[str, str],
) -> None:
    """Write a table: each run, and its difference."""
    ax.axis("off")
    ax.text(0, 0.95, "largest difference of a weight\nfrom one process's", va="top")
    for row, (name, value) in enumerate(differences.items()):
        height = 0.68 - 0.14 * row
        ax.text(0, height, name, va="top", color=colours[name], weight="bold")
        text = f"{value:.0e}" if value else "0"
        ax.text(1, height, text, va="top", ha="right")
