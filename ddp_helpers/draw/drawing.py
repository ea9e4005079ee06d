"""Draw: figures with alt text, and the primitives of diagrams, in inches, y downwards."""

import base64
import io
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.patheffects import withStroke
from PIL import Image

from ddp_helpers.draw.style import GREY, INK, LEFT, WIDTH, WRONG

DPI = 130  # sharp on most screens, and half the bytes of 160; the page shows it at the figure's size in inches
CSS_PIXELS_PER_INCH = 96


class Picture:
    """A figure that shows itself in a notebook as an image with alt text."""

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def save(self, path: str | Path) -> Path:
        """Write the figure to a file (the suffix says the format), and give its path."""
        self.figure.savefig(path, dpi=DPI)
        return Path(path)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        buffer, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI)
        # At most 256 colours: a third of the bytes, and no eye sees it in a figure of the course.
        colours = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        colours.save(small, "png", optimize=True)
        png = small.getvalue()
        pixels = int.from_bytes(png[16:20], "big")  # the width, where PNG's first chunk keeps it
        shown = {"alt": self.alt, "width": pixels * CSS_PIXELS_PER_INCH // DPI}
        return {"image/png": base64.b64encode(png).decode(), "text/plain": self.alt}, {"image/png": shown}

    def __repr__(self) -> str:
        return self.alt


def described(figure: Figure, alt: str) -> Picture:
    """Attach the alt text to a finished figure; every plotting function ends with this."""
    figure.set_label(alt)
    plt.close(figure)  # or the notebook would show it a second time, without the alt text
    return Picture(figure, alt)


Point = tuple[float, float]


def canvas(height: float, title: str) -> Axes:
    """An empty page with a title at its top; its figure is `canvas(...).figure`."""
    figure = plt.figure(figsize=(WIDTH, height))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    ax.axis("off")
    write(ax, LEFT, 0.25, title, size=14, weight="bold", ha="left")
    return ax


def pieces(left: float, right: float, count: int, gap: float = 0.12) -> list[Point]:
    """Left edge and width of equal pieces between two edges."""
    width = (right - left + gap) / count - gap
    return [(left + piece * (width + gap), width) for piece in range(count)]


def tint(colour: str, share: float) -> tuple[float, ...]:
    """The colour mixed with white, pale enough for dark text to be read on it."""
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))


def write(ax: Axes, x: float, y: float, text: object, *, size: float = 11.5, **options) -> None:
    """Text around a point; options go to matplotlib's `Axes.text`."""
    look = {"ha": "center", "va": "center", "color": INK, "linespacing": 1.35}
    if "\n" not in str(text):  # so that texts side by side share a baseline, with or without a "g" in them
        look["va"], y = "center_baseline", y - 0.002 * size
    ax.text(x, y, str(text), fontsize=size, **(look | options))


def fitting(width: float, *texts: str) -> str:
    """The first of the texts that fits into a width, at the small size; nothing, where none does."""
    lengths = {text: max(map(len, text.split("\n"))) for text in texts}
    return next((text for text, length in lengths.items() if length * 0.085 < width), "")


def halo(colour: str | tuple[float, ...]) -> dict:
    """Text options that keep a text readable on stripes and lines."""
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
    **text_options,
) -> FancyBboxPatch:
    """A box with its text in the middle; the corner is its upper left one."""
    (x, y), (width, height) = corner, extent
    shape = f"round,pad=0,rounding_size={min(0.07, height / 5)}"
    look = {"facecolor": tint(colour, fill), "edgecolor": colour, "linewidth": 1.6, "linestyle": line}
    patch = FancyBboxPatch((x, y), width, height, boxstyle=shape, hatch=hatch, **look)
    ax.add_patch(patch)
    if hatch:
        text_options |= halo(look["facecolor"])
    write(ax, x + width / 2, y + height / 2, text, **text_options)
    return patch


def arrow(ax: Axes, start: Point, end: Point, **options) -> None:
    """An arrow from one point to another; options go to matplotlib's `FancyArrowPatch`."""
    look = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.6, "color": INK}
    ax.add_patch(FancyArrowPatch(start, end, **({"shrinkA": 0, "shrinkB": 0} | look | options)))


def link(ax: Axes, source: FancyBboxPatch, target: FancyBboxPatch, *, bend: float = 0, line: str = "-") -> None:
    """An arrow from box to box, cut off at their edges; a bend makes it an arc."""
    start, end = ((b.get_x() + b.get_width() / 2, b.get_y() + b.get_height() / 2) for b in (source, target))
    clip = {"patchA": source, "patchB": target, "shrinkA": 2, "shrinkB": 2}
    arrow(ax, start, end, connectionstyle=f"arc3,rad={bend}", linestyle=line, **clip)


def span(ax: Axes, left: float, right: float, y: float, text: str, **text_options) -> None:
    """A measure with its text below it: |----|."""
    ends = {"color": INK, "linewidth": 1.6, "solid_capstyle": "butt"}
    ax.plot([left, right], [y, y], **ends)
    ax.vlines([left, right], y - 0.08, y + 0.08, color=INK, linewidth=1.6)
    write(ax, (left + right) / 2, y + 0.22, text, weight="bold", **text_options)


def cross_out(ax: Axes, corner: Point, extent: Point) -> None:
    """Two red lines through a box: this does not work."""
    (x, y), (width, height) = corner, extent
    for ends in ([y, y + height], [y + height, y]):
        ax.plot([x, x + width], ends, color=WRONG, linewidth=2, alpha=0.5)
