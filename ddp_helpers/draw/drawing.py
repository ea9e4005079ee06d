"""Give a figure its alt text, and draw diagrams from boxes, arrows and texts.

Coordinates of diagrams are in inches; y points downwards.
"""

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.patheffects import withStroke
from PIL import Image

from ddp_helpers.draw.style import GREY, INK, LEFT, WIDTH, Colour, Look

# Sharp on most screens, and half the bytes of 160; a page shows it at the figure's size in inches.
DPI = 130
_CSS_PIXELS_PER_INCH = 96


class Picture:
    """A figure that shows itself in a notebook as an image with alt text."""

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def save(self, path: str | Path) -> Path:
        """Write the figure to a file, whose suffix sets the format, and return its path."""
        self.figure.savefig(path, dpi=DPI)
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the figure as HTML, since JupyterLab drops the alt text of an image/png.

        With 256 colours it has a third of the bytes, and no visible difference.
        """
        full, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(full, format="png", dpi=DPI)
        image = Image.open(full).convert("RGB")
        image = image.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        image.save(small, "png", optimize=True)
        source = f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"
        width = image.width * _CSS_PIXELS_PER_INCH // DPI
        return f'<img src="{source}" alt="{escape(self.alt)}" width="{width}">'

    def __repr__(self) -> str:
        return self.alt


def described(figure: Figure | SubFigure, alt: str) -> Picture:
    """Attach the alt text to a finished figure; every plotting function ends with this.

    Raises TypeError for a part of a figure.
    """
    if not isinstance(figure, Figure):
        raise TypeError("a part of a figure cannot be shown alone: give the whole figure")
    figure.set_label(alt)
    plt.close(figure)  # or the notebook would show it a second time, without the alt text
    return Picture(figure, alt)


Point = tuple[float, float]


def canvas(height: float, title: str) -> Axes:
    """Make an empty page with a title at its top; its figure is `canvas(...).figure`."""
    figure = plt.figure(figsize=(WIDTH, height))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    ax.axis("off")
    write_left(ax, 0.25, title, size=14, weight="bold")
    return ax


def equal_parts(left: float, right: float, count: int, gap: float = 0.12) -> list[Point]:
    """Return the left edge and width of each of `count` equal pieces between two edges."""
    width = (right - left + gap) / count - gap
    return [(left + piece * (width + gap), width) for piece in range(count)]


def tint(colour: str, share: float) -> tuple[float, ...]:
    """Mix a share of the colour (0 to 1) with white, pale enough for dark text on it."""
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))


def write_text(ax: Axes, x: float, y: float, text: object, **options: Any) -> None:
    """Write a text around a point; without options, at 11.5 points and centred."""
    look: Look = {"size": 11.5, "ha": "center", "va": "center", "color": INK, "linespacing": 1.35}
    if "\n" not in str(text):
        # Texts side by side then share a baseline, with or without a "g" in them.
        look["va"] = "center_baseline"
        y -= 0.002 * options.get("size", 11.5)
    ax.text(x, y, str(text), **(look | options))


def write_left(ax: Axes, y: float, text: object, **options: Any) -> None:
    """Write a text that starts at the left edge of the page."""
    write_text(ax, LEFT, y, text, ha="left", **options)


def halo(colour: Colour) -> Look:
    """Return the text option that keeps a text readable on stripes and lines."""
    return {"path_effects": [withStroke(linewidth=5, foreground=colour)]}


def box(
    ax: Axes,
    corner: Point,
    extent: Point,
    text: object = "",
    colour: str = GREY,
    *,
    fill: float = 0.25,
    hatch: str = "",
    line: str = "-",
    **text_options: Any,
) -> None:
    """Draw a box with its text in the middle; the corner is its upper left one.

    fill: the share of the colour in the box, 0 to 1; line: matplotlib's style of its edge.
    """
    (x, y), (width, height) = corner, extent
    face = tint(colour, fill)
    patch = FancyBboxPatch(
        corner,
        *extent,
        boxstyle=f"round,pad=0,rounding_size={min(0.07, height / 5)}",
        hatch=hatch,
        facecolor=face,
        edgecolor=colour,
        linewidth=1.6,
        linestyle=line,
    )
    ax.add_patch(patch)
    if hatch:
        text_options |= halo(face)
    write_text(ax, x + width / 2, y + height / 2, text, **text_options)


def arrow(ax: Axes, start: Point, end: Point, **options: Any) -> None:
    """Draw an arrow from one point to another."""
    look: Look = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.6, "color": INK}
    ax.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **(look | options)))
