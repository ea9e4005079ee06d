"""The figure of notebook 15 that leads from what does not fit to a method.

The notebook calls it, in its own process; it draws from its tables alone.
"""

from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write_text
from ddp_helpers.draw.style import BLUE, GREEN, INK, LEFT, PURPLE, RIGHT, SKY, SMALL


class _Choice(NamedTuple):
    """A method, and the question to which yes means it; the last has none."""

    question: str
    method: str
    price: str
    colour: str


_CHOICES = [
    _Choice(
        "Does all fit: a replica with\nits state, and the batch?",
        "DDP",
        "nothing more; the reference for all below",
        BLUE,
    ),
    _Choice(
        "Does it fit with fewer\nactivations?",
        "DDP, with accumulation or recomputation",
        "small pieces, or computing twice; no more is sent",
        SKY,
    ),
    _Choice(
        "Does a layer fit whole, beside\n1/N of the model and its state?",
        "FSDP2: fully_shard",
        "weights gathered twice a step; checkpoints in parts",
        GREEN,
    ),
    _Choice(
        "",
        "FSDP2 with tensor parallel, then pipeline",
        "activations sent inside each layer: within a node; then from stage to stage",
        PURPLE,
    ),
]
_CURES = {  # by condition, whatever the choice
    "A script with DDP lacks only a little memory:": "ZeroRedundancyOptimizer (ZeRO-1)",
    "The network is the limit, as measured:": "with DDP, a bf16 hook first, then PowerSGD",
    "The ranks have unequal numbers of batches:": "even them out in the sampler; else Join",
    "The device has units for bfloat16:": "autocast, for time",
}
# Of the boxes: the top of the first, the distance from one to the next, their height, the middle
# and the width of those on the left, and the left edge of those on the right.
_TOP, _DISTANCE, _HEIGHT, _MIDDLE, _WIDE, _METHODS_LEFT = 0.6, 1.0, 0.66, 1.4, 2.8, 3.7


def choose() -> Picture:
    """Draw how to go from what fits to a method: ask in this order, and take the first yes."""
    title = "Ask in this order, and take the first yes"
    foot = _TOP + _DISTANCE * len(_CHOICES)
    ax = canvas(foot + 0.25 + 0.34 * len(_CURES), title)
    for row, choice in enumerate(_CHOICES):
        _draw_choice(ax, row, choice)
    write_text(ax, LEFT, foot + 0.02, "Beside that", ha="left", weight="bold")
    for row, (condition, cure) in enumerate(_CURES.items()):
        y = foot + 0.36 + 0.34 * row
        write_text(ax, LEFT, y, condition, ha="left", size=11)
        write_text(ax, 3.85, y, cure, ha="left", weight="bold", size=11)
    lines = [
        f"{choice.question} {choice.method}.".replace("\n", " ").lstrip() for choice in _CHOICES
    ]
    lines += [f"{condition} {cure}." for condition, cure in _CURES.items()]
    return described(ax.figure, f"{title}. {' '.join(lines)}")


def _draw_choice(ax: Axes, row: int, choice: _Choice) -> None:
    """Draw a question, the arrow that leads to it from the row above, and the method for yes."""
    y = _TOP + _DISTANCE * row
    above = y - _DISTANCE + _HEIGHT  # where the box of the row above ends
    middle = y + _HEIGHT / 2
    if row:
        between = y - (_DISTANCE - _HEIGHT) / 2
        write_text(ax, _MIDDLE + 0.1, between, "no", ha="left", **SMALL)
    if choice.question:
        if row:
            arrow(ax, (_MIDDLE, above), (_MIDDLE, y))
        box(ax, (LEFT, y), (_WIDE, _HEIGHT), choice.question, INK, fill=0.06, size=11)
        write_text(ax, 3.28, middle - 0.15, "yes", weight="bold", size=11)
        start = LEFT + _WIDE + 0.02
    else:
        ax.plot([_MIDDLE, _MIDDLE], [above, middle], color=INK, linewidth=1.6)
        start = _MIDDLE
    arrow(ax, (start, middle), (_METHODS_LEFT - 0.02, middle))
    size = RIGHT - _METHODS_LEFT, _HEIGHT
    box(ax, (_METHODS_LEFT, y), size, colour=choice.colour, fill=0.15)
    write_text(ax, 3.85, y + 0.21, choice.method, ha="left", weight="bold", size=11)
    write_text(ax, 3.85, y + 0.46, choice.price, ha="left", **SMALL)
