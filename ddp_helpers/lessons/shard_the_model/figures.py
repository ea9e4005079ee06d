"""The figure of notebook 15 that leads from the part that does not fit to a method.

The notebook calls it, in the driver process; it draws from its tables alone.
"""

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write_left, write_text
from ddp_helpers.draw.style import BLUE, GREEN, INK, LEFT, PURPLE, SKY, SMALL

_CHOICES = [  # a question, the method if the answer is yes, its price, its colour
    (
        "Does all fit: a replica with\nits state, and the batch?",
        "DDP",
        "nothing more (FSDP2 with weights kept, if tensor parallel is added)",
        BLUE,
    ),
    (
        "Does it fit with fewer\nactivations?",
        "DDP, with accumulation or activation checkpointing",
        "micro-batches, or computing twice; no more is sent",
        SKY,
    ),
    (
        "Does a full layer fit, with\n1/N of the model and its state?",
        "FSDP2: fully_shard; or HSDP",
        "weights gathered twice per step; HSDP if one of several nodes would do",
        GREEN,
    ),
    (
        "A full layer does not fit:",
        "FSDP2 with tensor parallel, then pipeline",
        "activations sent inside each layer: within a node; then from stage to stage",
        PURPLE,
    ),
]
_CURES = {  # by condition, whatever the choice
    "A script with DDP lacks only a little memory:": "ZeroRedundancyOptimizer (ZeRO-1)",
    "The network is the limit, as measured:": "with DDP, a bf16 hook first, then PowerSGD",
    "The ranks have unequal numbers of batches:": "stop all at the fewest; otherwise Join",
    "The device has units for bfloat16:": "autocast, for time",
}


def choose() -> Picture:
    """Draw how to choose a method by what fits: ask in this order, and take the first yes."""
    title = "Ask in this order, and take the first yes"
    ax = canvas(6.21, title)
    lines = [title]
    for row, (question, method, price, colour) in enumerate(_CHOICES):
        y = 0.6 + row
        is_last = row == len(_CHOICES) - 1
        box(ax, (LEFT, y), (2.8, 0.66), question, INK, fill=0.06, size=11)
        arrow(ax, (2.92, y + 0.33), (3.68, y + 0.33))
        box(ax, (3.7, y), (5.7, 0.66), colour=colour, fill=0.15)
        write_text(ax, 3.85, y + 0.21, method, ha="left", weight="bold", size=11)
        write_text(ax, 3.85, y + 0.46, price, ha="left", **SMALL)
        if not is_last:
            write_text(ax, 3.28, y + 0.18, "yes", weight="bold", size=11)
            arrow(ax, (1.4, y + 0.66), (1.4, y + 1))
            write_text(ax, 1.5, y + 0.83, "no", ha="left", **SMALL)
        lines.append(f"{question} {method}".replace("\n", " "))
    write_left(ax, 4.62, "In addition", weight="bold")
    for row, (condition, cure) in enumerate(_CURES.items()):
        write_left(ax, 4.96 + 0.34 * row, condition, size=11)
        write_text(ax, 3.85, 4.96 + 0.34 * row, cure, ha="left", weight="bold", size=11)
        lines.append(f"{condition} {cure}")
    return described(ax.figure, ". ".join(lines) + ".")
