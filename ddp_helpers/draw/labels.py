"""Titles, captions, colours and labels that do not overlap, for figures of measurements."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.style import GREY

Label = tuple[float, float, str, str]  # the point in data units, text, colour
# Letters per inch of a figure's width.
_TITLE_LETTERS, _CAPTION_LETTERS = 8.9, 13


def at_the_right(ax: Axes, labels: Sequence[Label]) -> None:
    """Write each label to the right of its point, all at least one line apart.

    Call it when the limits and scales of the axes are final.
    """
    ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
    to_axes = ax.transScale + ax.transLimits
    ends = sorted((*to_axes.transform((x, y))[::-1], *look) for x, y, *look in labels)
    steps = 0.09 * np.arange(len(ends))  # of the axes' height
    # The positions nearest to the heights that are at least a step apart.
    nearest = isotonic_regression([height for height, *_ in ends] - steps).x
    places = np.clip(nearest, 0, 1 - steps[-1]) + steps
    for (height, right, text, colour), place in zip(ends, places, strict=True):
        ax.annotate(
            text,
            (right + 0.01, height),
            (right + 0.04, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            annotation_clip=False,
            va="center",
            color=_darkened(colour),
            arrowprops={"arrowstyle": "-", "linestyle": ":", "relpos": (0, 0.5), "shrinkB": 0},
        )


def stacked_bars(
    table: pd.DataFrame,
    colours: Mapping[str, str],
    **options: Any,
) -> tuple[Figure, Axes, list[BarContainer]]:
    """Draw a bar for each row of a table, the first on top, with a part for each of its columns.

    options: pandas' for `plot.barh`. Returns the figure, its axes, and the bars of each column.
    """
    ax = table.plot.barh(stacked=True, color=colours, width=0.7, **options)
    ax.figure.set_layout_engine("constrained")
    ax.invert_yaxis()
    ax.tick_params(axis="y", which="both", length=0)
    return ax.figure, ax, ax.containers


def _darkened(colour: str) -> tuple[float, ...]:
    """Return the hue of a line, dark enough for text on white."""
    return tuple(0.58 * part for part in to_rgb(colour))


def write_title(figure: Figure, text: str) -> None:
    """Write the figure's title, bold and left: its finding, with the numbers that it draws."""
    letters = int(figure.get_figwidth() * _TITLE_LETTERS)
    title = textwrap.fill(text, letters)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, weight="bold")


def write_caption(figure: Figure, *parts: str) -> None:
    """Write the caption below the figure, from the parts that are not empty."""
    sentences = [part[0].upper() + part[1:] for part in parts if part]
    if sentences:
        letters = int(figure.get_figwidth() * _CAPTION_LETTERS)
        text = textwrap.fill(f"{'. '.join(sentences)}.", letters)
        figure.supxlabel(text, fontsize=10, color=GREY, x=0.01, ha="left")


def captioned(figure: Figure, title: str, *parts: str, alt: str = "") -> Picture:
    """Finish a figure with its title, a finding, and its caption.

    The alt text has both, and then `alt`: the numbers that the figure draws.
    """
    write_title(figure, title)
    write_caption(figure, *parts)
    sentences = [part for part in (title, *parts, alt) if part]
    return described(figure, ". ".join(sentences) + ".")
