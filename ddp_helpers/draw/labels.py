"""What the figures of a scaling study share: a title that is a finding, labels that do not overlap, a caption."""

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.style import GREY, rank_colour
from ddp_helpers.records.scaling import many

LABEL = tuple[float, float, str, str]  # the point in data units, text, colour


def at_the_right(ax: Axes, labels: Sequence[LABEL], gap: float = 0.075) -> None:
    """Write each label right of its point; those of one column are pushed apart where they would overlap.

    Call it when the limits and scales of the axes are final. gap: the least distance, as a share of the height.
    """
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
    columns: dict[float, list[tuple[float, str, str]]] = {}
    for x, y, text, colour in labels:
        place, height = (ax.transScale + ax.transLimits).transform((x, y))
        columns.setdefault(round(place, 2), []).append((height, text, colour))
    for place, ends in columns.items():
        ends.sort()
        for (point, text, colour), height in zip(ends, apart([end[0] for end in ends], gap), strict=True):
            look = {"transform": ax.transAxes, "color": dark(colour), "clip_on": False}
            ax.plot([place + 0.01, place + 0.03], [point, height], ":", linewidth=0.9, zorder=0, **look)
            ax.text(place + 0.035, height, text, va="center", **look)


def dark(colour: str) -> tuple[float, ...]:
    """The hue of a line, dark enough for text on white."""
    return tuple(0.58 * part for part in to_rgb(colour))


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, in ascending order, moved as little as gives each pair of neighbours its distance."""
    moved = list(heights)
    for _ in range(500):
        for row in range(1, len(moved)):
            lack = max(0.0, gap - (moved[row] - moved[row - 1])) / 2
            moved[row - 1], moved[row] = moved[row - 1] - lack, moved[row] + lack
    low, high = (moved[0], moved[-1]) if moved else (0, 0)
    return [height - min(low, 0) * (low < 0) - max(high - 1, 0) * (low >= 0) for height in moved]


def finding(figure: Figure, text: str) -> None:
    """Write the figure's title, bold and left: what it shows, in its own numbers."""
    wide = int(figure.get_figwidth() * 8.9)
    figure.suptitle(textwrap.fill(text, wide), x=0.01, ha="left", fontsize=14, weight="bold")


def caption(figure: Figure, *parts: str) -> None:
    """Write what the reader must know below the figure; empty parts are left out."""
    if said := ". ".join(part[0].upper() + part[1:] for part in parts if part):
        wide = int(figure.get_figwidth() * 13)
        figure.supxlabel(textwrap.fill(f"{said}.", wide), fontsize=10, color=GREY, x=0.01, ha="left")


def captioned(figure: Figure, title: str, *parts: str) -> Picture:
    """Finish a figure with its title, a finding, and its caption; the alt text says both."""
    finding(figure, title)
    caption(figure, *parts)
    return described(figure, ". ".join(part for part in (title, *parts) if part) + ".")


def setting(scaling: str, cpus: float) -> str:
    """The name of a line: which batch was kept, and the CPUs that each rank had."""
    return scaling if pd.isna(cpus) else f"{scaling}, {many(int(cpus), 'CPU')} each"


def colours(keys: Sequence) -> dict:
    """A colour for each, in the order of the palette, and around again."""
    return {key: rank_colour(place) for place, key in enumerate(keys)}


def sizes(ax: Axes, counts: Sequence[int], unit: str) -> None:
    """A logarithmic axis with a tick at each number of ranks, thinned out where they would stand too close."""
    ax.set_xscale("log", base=2)
    kept: list[int] = []
    for count in sorted(set(map(int, counts))):
        if not kept or count >= 1.3 * kept[-1]:
            kept.append(count)
    ax.set_xticks(kept, [f"{count:,}" for count in kept])
    ax.minorticks_off()
    ax.set(xlabel=f"{unit}s", xlim=(kept[0] / 1.25, kept[-1] * 1.25))
