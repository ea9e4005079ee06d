"""What figures of measurements share: titles, captions, colours, labels that do not overlap.

Lessons and `curves` call it for a figure of matplotlib's, in a notebook's process.
"""

import textwrap
from collections.abc import Hashable, Sequence
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.style import GREY, rank_colour

Label = tuple[float, float, str, str]  # the point in data units, text, colour
_Key = TypeVar("_Key", bound=Hashable)
# Letters on an inch of a figure's width.
_TITLE_LETTERS, _CAPTION_LETTERS = 8.9, 13


def at_the_right(ax: Axes, labels: Sequence[Label], gap: float = 0.075) -> None:
    """Write each label right of its point; those of one column are pushed apart.

    Call it when the limits and scales of the axes are final. gap: the least distance of two labels,
    as a share of the axes' height.
    """
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
    to_axes = ax.transScale + ax.transLimits
    columns: dict[float, list[tuple[float, str, str]]] = {}
    for x, y, text, colour in labels:
        column, height = to_axes.transform((x, y))
        columns.setdefault(round(column, 2), []).append((height, text, colour))
    for column, ends in columns.items():
        ends.sort()
        moved = _apart([height for height, _, _ in ends], gap)
        for (height, text, colour), label_height in zip(ends, moved, strict=True):
            _write_label(ax, column, height, label_height, text, colour)


def _write_label(
    ax: Axes,
    column: float,
    height: float,
    label_height: float,
    text: str,
    colour: str,
) -> None:
    """Write a label, and a dotted line to it from the end of its curve, at `height`.

    Places are shares of the axes.
    """
    ax.plot(
        [column + 0.01, column + 0.03],
        [height, label_height],
        ":",
        linewidth=0.9,
        zorder=0,
        transform=ax.transAxes,
        color=darkened(colour),
        clip_on=False,
    )
    ax.text(
        column + 0.035,
        label_height,
        text,
        va="center",
        transform=ax.transAxes,
        color=darkened(colour),
        clip_on=False,
    )


def darkened(colour: str) -> tuple[float, ...]:
    """Return the hue of a line, dark enough for text on white."""
    return tuple(0.58 * part for part in to_rgb(colour))


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights, which ascend, as little as gives each pair of neighbours its distance."""
    moved = list(heights)
    for _ in range(500):
        for upper in range(1, len(moved)):
            lower = upper - 1
            lack = max(0.0, gap - (moved[upper] - moved[lower])) / 2
            moved[lower] -= lack
            moved[upper] += lack
    low, high = (moved[0], moved[-1]) if moved else (0, 0)
    if low < 0:  # then all move up, else down if the last is above the axes
        return [height - low for height in moved]
    return [height - max(high - 1, 0) for height in moved]


def write_title(figure: Figure, text: str) -> None:
    """Write the figure's title, bold and left: what it shows, in its own numbers."""
    letters = int(figure.get_figwidth() * _TITLE_LETTERS)
    title = textwrap.fill(text, letters)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, weight="bold")


def write_caption(figure: Figure, *parts: str) -> None:
    """Write what the reader must know below the figure; empty parts are left out."""
    sentences = [part[0].upper() + part[1:] for part in parts if part]
    if sentences:
        letters = int(figure.get_figwidth() * _CAPTION_LETTERS)
        text = textwrap.fill(f"{'. '.join(sentences)}.", letters)
        figure.supxlabel(text, fontsize=10, color=GREY, x=0.01, ha="left")


def captioned(figure: Figure, title: str, *parts: str) -> Picture:
    """Finish a figure with its title, a finding, and its caption; the alt text says both."""
    write_title(figure, title)
    write_caption(figure, *parts)
    sentences = [part for part in (title, *parts) if part]
    return described(figure, ". ".join(sentences) + ".")


def colours(keys: Sequence[_Key]) -> dict[_Key, str]:
    """Give each key a colour, in the order of the palette, and around again."""
    return {key: rank_colour(index) for index, key in enumerate(keys)}


def scale_ranks_axis(ax: Axes, counts: Sequence[int], unit: str) -> None:
    """Make the x axis logarithmic, with a tick at each number of ranks.

    Ticks that would stand too close to the one before are left out. unit: what a rank uses.
    """
    ax.set_xscale("log", base=2)
    ticks: list[int] = []
    for count in sorted({int(count) for count in counts}):
        if not ticks or count >= 1.3 * ticks[-1]:
            ticks.append(count)
    ax.set_xticks(ticks, [f"{count:,}" for count in ticks])
    ax.minorticks_off()
    ax.set(xlabel=f"{unit}s", xlim=(ticks[0] / 1.25, ticks[-1] * 1.25))
