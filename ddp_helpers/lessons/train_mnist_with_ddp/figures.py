"""The figure of notebook 06: right answers of one process and several, and weight differences.

The notebook calls it, in the driver process, with what the runs recorded.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
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
    figure, (curves, table) = plt.subplots(
        1, 2, figsize=(WIDTH, 3.6), layout="constrained", width_ratios=(2, 1)
    )
    table.axis("off")
    table.text(0, 0.95, "largest difference of a weight\nfrom one process's", va="top")
    texts = []
    for number, (name, values) in enumerate(right.items()):
        colour, line = rank_colour(number), "-"
        if name == control:
            colour, line = RED, "--"
        epochs = range(1, len(values) + 1)
        # A later run is thinner than those below it.
        width = 1 + 2 * (len(right) - number - 1)
        curves.plot(epochs, values, line, alpha=0.8, color=colour, label=name, linewidth=width)
        texts.append(f"{name}: {', '.join(map(str, values))}")
        if name in differences:
            height, apart = 0.68 - 0.14 * number, differences[name]
            table.text(0, height, name, va="top", color=colour, weight="bold")
            table.text(1, height, f"{apart:.0e}" if apart else "0", va="top", ha="right")
            texts[-1] += f", weights differ by {apart:.0e}"
    curves.set(xlabel="epoch", ylabel="right answers", xticks=epochs)
    curves.legend(loc="upper left", fontsize="small", labelspacing=0.3, bbox_to_anchor=(0.0, 1.03))
    alone, *others = [name for name in right if name != control]
    names = f"{', '.join(others[:-1])} and {others[-1]}"
    title = f"{names} learn the model of {alone}; {control}: a different one"
    return captioned(figure, title, where, alt=f"right answers by epoch, {'; '.join(texts)}")
