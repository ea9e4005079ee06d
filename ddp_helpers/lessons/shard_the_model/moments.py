"""Draw who holds what at each moment of a training step with FSDP.

Notebook 15 calls it, in the driver process; the moments are a table.
"""

from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import (
    Picture,
    Point,
    box,
    canvas,
    described,
    equal_parts,
    write_left,
    write_text,
)
from ddp_helpers.draw.style import GREY, INK, LEFT, RIGHT, SMALL, rank_colour

_RANKS = 2
_HELD = {"none": "nothing", "part": "its own half", "all": "all"}


class _Moment(NamedTuple):
    """A moment of the step; for each of the two layers `none`, `part` (its own half) or `all`."""

    title: str
    message: str
    weights: tuple[str, str]
    gradients: tuple[str, str]


_NOTHING = ("none", "none")
_MOMENTS = [
    _Moment("At rest, each rank holds half of each layer", "", ("part", "part"), _NOTHING),
    _Moment(
        "Forward, layer 1: its weights are gathered",
        "all-gather: the halves of layer 1's weights",
        ("all", "part"),
        _NOTHING,
    ),
    _Moment(
        "Forward, layer 2: layer 1 is freed, the next gathered",
        "all-gather: the halves of layer 2's weights",
        ("part", "all"),
        _NOTHING,
    ),
    _Moment(
        "Backward, layer 2: each rank has a full gradient, of its own batch",
        "",
        ("part", "all"),
        ("none", "all"),
    ),
    _Moment(
        "Each rank keeps its half of the mean gradient; the layer is freed",
        "reduce-scatter: layer 2's gradients",
        ("part", "part"),
        ("none", "part"),
    ),
    _Moment(
        "Backward, layer 1: its weights are gathered again",
        "all-gather: the halves of layer 1's weights",
        ("all", "part"),
        ("all", "part"),
    ),
    _Moment(
        "Again each rank keeps its half of the mean",
        "reduce-scatter: layer 1's gradients",
        ("part", "part"),
        ("part", "part"),
    ),
    _Moment(
        "The optimizer steps: each rank changes its own half",
        "",
        ("part", "part"),
        ("part", "part"),
    ),
]


def moments_of_a_step() -> list[Picture]:
    """Draw the moments one by one, to be stepped through."""
    return [_draw_moment(number, moment) for number, moment in enumerate(_MOMENTS, 1)]


def _draw_moment(number: int, now: _Moment) -> Picture:
    """Draw what each of two ranks holds of two layers at a moment of the step."""
    ax = canvas(3.9, now.title)
    sent = f"sent now: {now.message}" if now.message else "sent now: nothing"
    write_left(ax, 0.66, f"moment {number} of {len(_MOMENTS)};  {sent}")
    for rank, (left, width) in enumerate(equal_parts(LEFT, RIGHT, _RANKS, gap=0.3)):
        box(ax, (left, 0.98), (width, 2.8), fill=0.06)
        write_text(ax, left + 0.5, 1.24, f"rank {rank}", weight="bold")
        columns = equal_parts(left + 0.85, left + width - 0.1, 3, gap=0.15)
        heads = ("weights", "gradients", "Adam's state")
        for head, (start, extent) in zip(heads, columns, strict=True):
            write_text(ax, start + extent / 2, 1.6, head, **SMALL)
        for layer in range(2):
            y = 1.9 + 0.95 * layer
            write_text(ax, left + 0.45, y + 0.35, f"layer {layer + 1}", **SMALL)
            held = (now.weights[layer], now.gradients[layer], "part")
            for state, (start, extent) in zip(held, columns, strict=True):
                _draw_halves(ax, (start, y), (extent, 0.7), rank, state)
    layers = [
        f"of layer {layer + 1} {_HELD[now.weights[layer]]} of the weights, "
        f"{_HELD[now.gradients[layer]]} of the gradients, its own half of Adam's state"
        for layer in range(2)
    ]
    alt = f"Moment {number} of {len(_MOMENTS)}: {now.title}; {sent}. "
    return described(ax.figure, f"{alt}Each rank holds {'; '.join(layers)}.")


def _draw_halves(ax: Axes, corner: Point, extent: Point, rank: int, state: str) -> None:
    """Draw a tensor as two halves: the rank's own, the other's, or an empty box."""
    (x, y), (width, height) = corner, extent
    for owner, (start, part) in enumerate(equal_parts(x, x + width, _RANKS, gap=0.03)):
        is_held = state == "all" or (state == "part" and owner == rank)
        look = rank_colour(owner) if is_held else GREY
        box(
            ax,
            (start, y),
            (part, height),
            f"½ of\nrank {owner}" if is_held else "",
            look,
            fill=0.35 if is_held else 0,
            line="-" if is_held else ":",
            color=INK,
            size=9,
        )
