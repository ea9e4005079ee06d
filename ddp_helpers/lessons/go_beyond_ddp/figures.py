"""Which way to train a model that may not fit: questions, and what to take at the first yes."""

from matplotlib.axes import Axes

from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import LEFT, RIGHT, SMALL, arrow, box, canvas, write
from ddp_helpers.notebook.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY

# A question; what to take if the answer is yes, what that costs, and its colour.
QUESTIONS = [
    (
        "Does all fit: a replica with\nits state, and the batch?",
        "DDP",
        "nothing more; the reference for all below",
        BLUE,
    ),
    (
        "Does it fit with a\nsmaller batch?",
        "DDP, with accumulation, autocast or recomputation",
        "smaller pieces or rounding; the same communication",
        SKY,
    ),
    (
        "Does it fit with the\noptimizer state cut?",
        "DDP, with ZeroRedundancyOptimizer",
        "a broadcast of the weights in each step",
        ORANGE,
    ),
    (
        "Does a layer fit whole,\nbeside 1/N of the rest?",
        "FSDP2: fully_shard",
        "weights gathered twice a step; checkpoints in parts",
        GREEN,
    ),
]
LAST = ("tensor or pipeline parallel", "the model's own code must be cut")
BESIDE = [
    ("The network is the limit, as measured:", "with DDP, a bf16 hook first, then PowerSGD"),
    ("The ranks have unequal numbers of batches:", "even them out in the sampler; else Join"),
    ("The device has units for bfloat16:", "autocast, for time"),
]
STEP, HIGH, MIDDLE, WIDE = 1.0, 0.66, 1.4, 2.6


def choose() -> Picture:
    """From what fits to what to use: ask in this order, and take the first yes."""
    bottom = 0.6 + STEP * len(QUESTIONS)
    ax = canvas(bottom + 1.25 + 0.34 * len(BESIDE), "Ask in this order, and take the first yes")
    for place, (question, name, price, colour) in enumerate(QUESTIONS):
        y = 0.6 + STEP * place
        box(ax, (LEFT, y), (WIDE, HIGH), question, INK, fill=0.06, size=11)
        answer(ax, y, name, price, colour)
        arrow(ax, (LEFT + WIDE + 0.02, y + HIGH / 2), (3.48, y + HIGH / 2))
        write(ax, 3.08, y + HIGH / 2 - 0.15, "yes", weight="bold", size=11)
        if place < len(QUESTIONS) - 1:
            arrow(ax, (MIDDLE, y + HIGH), (MIDDLE, y + STEP))
            write(ax, MIDDLE + 0.1, y + (HIGH + STEP) / 2, "no", ha="left", **SMALL)
    y = bottom - STEP + HIGH
    middle = bottom + HIGH / 2
    ax.plot([MIDDLE, MIDDLE], [y, middle], color=INK, linewidth=1.6)
    arrow(ax, (MIDDLE, middle), (3.48, middle))
    write(ax, MIDDLE + 0.1, (y + bottom) / 2, "no", ha="left", **SMALL)
    answer(ax, bottom, *LAST, PURPLE)
    write(ax, LEFT, bottom + 1.02, "Beside that", ha="left", weight="bold")
    for place, (question, cure) in enumerate(BESIDE):
        y = bottom + 1.36 + 0.34 * place
        write(ax, LEFT, y, question, ha="left", size=11)
        write(ax, 3.65, y, cure, ha="left", weight="bold", size=11)
    return described(ax.figure, told())


def answer(ax: Axes, y: float, name: str, price: str, colour: str) -> None:
    """A box with what to take, and its price."""
    box(ax, (3.5, y), (RIGHT - 3.5, HIGH), colour=colour, fill=0.15)
    write(ax, 3.65, y + 0.21, name, ha="left", weight="bold", size=11)
    write(ax, 3.65, y + 0.46, price, ha="left", **SMALL)


def told() -> str:
    """The same in words."""
    asked = [(question.replace("\n", " "), name, price) for question, name, price, _ in QUESTIONS]
    lines = [f"{question} Yes: {name}. Price: {price}." for question, name, price in asked]
    beside = [f"{question} {cure}." for question, cure in BESIDE]
    return " ".join(["Questions in order; take the first yes.", *lines, f"No: {LAST[0]}.", *beside])
