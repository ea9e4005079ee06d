"""Draw the figures of notebook 09: where the seconds of a step go, by size and by rank.

The notebook calls them in its own process.
"""

from collections.abc import Mapping, Sequence

import pandas as pd

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, stacked_bars
from ddp_helpers.draw.style import BLUE, ORANGE, RED, WIDTH
from ddp_helpers.records.scaling import counted

# Where a rank's seconds go: it loads, computes, waits for late ranks, and exchanges gradients.
PARTS = {"data": ORANGE, "compute": BLUE, "wait": "#CCCCCC", "exchange": RED}


def parts_by_size(seconds: Mapping[int, Sequence[float]], steps: str) -> Picture:
    """Draw where the seconds of rank 0 go, a bar for each number of ranks.

    seconds: by the number of ranks, the four numbers of PARTS. steps: for the caption.
    """
    rows = {counted(size, "rank"): values for size, values in seconds.items()}
    (_, alone, *_), *_, (_, compute, wait, exchange) = seconds.values()
    title = f"On {max(seconds)} ranks sharing saves {alone - compute:.1f} s of computing, "
    title += f"wait and exchange cost {wait + exchange:.1f} s"
    return _stacked(rows, title, f"rank 0, {steps}")


def parts_by_rank(seconds: Mapping[str, Sequence[Sequence[float]]], steps: str) -> Picture:
    """Draw where the seconds of each rank go, in each of several runs.

    seconds: by the name of a run, for each rank the four numbers of PARTS. steps: for the caption.
    """
    rows: dict[str, Sequence[float]] = {}
    for name, ranks in seconds.items():
        rows |= {f"{name}: rank {rank}": values for rank, values in enumerate(ranks)}
    # of the last run
    waits = [f"rank {rank} waits {wait:.1f} s" for rank, (_, _, wait, _) in enumerate(ranks)]
    title = f"{name[0].upper()}{name[1:]}: {', '.join(waits)}"
    return _stacked(rows, title, f"every rank, {steps}")


def _stacked(seconds: Mapping[str, Sequence[float]], title: str, caption: str) -> Picture:
    """Draw a bar for each row: the seconds of PARTS, one behind the other."""
    table = pd.DataFrame(seconds, index=list(PARTS)).T
    figure, ax, columns = stacked_bars(table, PARTS, figsize=(WIDTH, 2.1 + 0.42 * len(table)))
    longest = table.sum(axis=1).max()
    for bars, part in zip(columns, PARTS, strict=True):
        texts = [f"{each:.2f}" if each > 0.06 * longest else "" for each in table[part]]
        text_colour = "white" if part == "compute" else "black"
        ax.bar_label(bars, texts, label_type="center", color=text_colour)
    ax.set_xlabel("seconds")
    ax.legend(ncols=len(PARTS), loc="lower left", bbox_to_anchor=(-0.01, 0.99), fontsize=10)
    return captioned(figure, title, caption)
