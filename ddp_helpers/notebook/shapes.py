"""The drawing primitives of the diagrams: one unit is one inch, and y grows downwards, as on a page."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.patheffects import withStroke

from ddp_helpers.notebook import style

WIDTH, LEFT, RIGHT = 9.5, 0.1, 9.4  # the page, and where its contents begin and end
WRONG = "#C00000"  # no rank's colour: a thing that fails
SMALL, CODE = {"size": 10}, {"size": 10, "family": "monospace"}
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
Point = tuple[float, float]

style.use()
plt.rcParams["hatch.linewidth"] = 0.7  # thin enough to read a number on it


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
    look = {"ha": "center", "va": "center", "color": style.INK, "linespacing": 1.35}
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
    colour: str = style.GREY,
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
    look = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.6, "color": style.INK}
    ax.add_patch(FancyArrowPatch(start, end, **({"shrinkA": 0, "shrinkB": 0} | look | options)))


def link(ax: Axes, source: FancyBboxPatch, target: FancyBboxPatch, *, bend: float = 0, line: str = "-") -> None:
    """An arrow from box to box, cut off at their edges; a bend makes it an arc."""
    start, end = ((b.get_x() + b.get_width() / 2, b.get_y() + b.get_height() / 2) for b in (source, target))
    clip = {"patchA": source, "patchB": target, "shrinkA": 2, "shrinkB": 2}
    arrow(ax, start, end, connectionstyle=f"arc3,rad={bend}", linestyle=line, **clip)


def span(ax: Axes, left: float, right: float, y: float, text: str, **text_options) -> None:
    """A measure with its text below it: |----|."""
    ends = {"color": style.INK, "linewidth": 1.6, "solid_capstyle": "butt"}
    ax.plot([left, right], [y, y], **ends)
    ax.vlines([left, right], y - 0.08, y + 0.08, color=style.INK, linewidth=1.6)
    write(ax, (left + right) / 2, y + 0.22, text, weight="bold", **text_options)


def cross_out(ax: Axes, corner: Point, extent: Point) -> None:
    """Two red lines through a box: this does not work."""
    (x, y), (width, height) = corner, extent
    for ends in ([y, y + height], [y + height, y]):
        ax.plot([x, x + width], ends, color=WRONG, linewidth=2, alpha=0.5)
