"""The figures of notebook 16: a ring, a layer gathered at times, two sums, two orders.

The notebook calls them, in the driver process.
"""

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import (
    Picture,
    arrow,
    box,
    canvas,
    described,
    equal_parts,
    write_left,
    write_text,
)
from ddp_helpers.draw.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SMALL,
    TIMES,
    Look,
    rank_colour,
)
from ddp_helpers.lessons.build_it_yourself.schedule import (
    FORWARD,
    UNITS,
    Work,
    bubble,
    length,
    most_held,
    schedule,
)

# ---- the ring


def ring_step(number: int, world_size: int = 4) -> Picture:
    """Draw one step of the ring: the piece that each rank sends, and the receiver's sum after it.

    number: of the step, from 0, the start, to 2 * (world_size - 1).
    """
    rounds = world_size - 1
    finding = f"Step {number}: a complete sum arrives, and replaces the old piece"
    if not number:
        finding = f"Start: each rank has {world_size} pieces, and only its own numbers"
    elif number < rounds:
        finding = f"Step {number}: each rank adds the piece that arrives to its own"
    elif number == rounds:
        finding = f"Step {number}: now each rank has the complete sum of one piece"
    elif number == 2 * rounds:
        finding = f"Step {number}: every rank has every sum"
    bottom = 1.0 + 0.55 * world_size
    ax = canvas(bottom + 0.75, finding)
    for piece in range(world_size):
        write_left(ax, 1.2 + 0.55 * piece, f"piece {piece}", **SMALL)
    for rank, (left, width) in enumerate(equal_parts(1.35, 8.75, world_size, gap=0.75)):
        write_text(ax, left + width / 2, 0.75, f"rank {rank}", weight="bold")
        for piece in range(world_size):
            y = 1.0 + 0.55 * piece
            # In this step the rank adds the piece; it comes again, summed, world_size steps later.
            comes = (rank - piece) % world_size
            added = range(rank - comes if comes <= number else rank, rank + 1)
            look: Look = {"colour": rank_colour(rank), "fill": 0.12 + 0.15 * (len(added) - 1)}
            text = "+".join(str(each % world_size) for each in added)
            if len(added) == world_size or number >= comes + world_size:
                text, look = "all", {"colour": INK, "fill": 0.85, "color": "white"}
            box(ax, (left, y), (width, 0.4), text, **look, **SMALL)
            if number and number % world_size == comes:
                start = left - 0.72 if rank else left - 0.45
                arrow(ax, (start, y + 0.2), (left - 0.03, y + 0.2), linewidth=2.5)
                if not rank:  # it comes from the last rank, round the page
                    arrow(ax, (8.78, y + 0.2), (9.2, y + 0.2), linewidth=2.5)
    counter = f"sent so far by each rank: {number} of {2 * rounds} pieces, "
    counter += f"{number / world_size:g} {TIMES} its tensor"
    key = "in a box: the ranks whose numbers are added up; the last rank sends to rank 0"
    write_left(ax, bottom + 0.2, counter, weight="bold")
    write_left(ax, bottom + 0.5, key, **SMALL)
    return described(ax.figure, f"{finding}; {counter}.")


# ---- a layer that is gathered only while it computes

_LIFE = [  # what happens, its width in the drawing, its colour, and whether the weight is gathered
    ("all-gather", 1.15, GREEN, True),
    ("forward", 1.0, GREY, True),
    ("free", 0.55, ORANGE, False),
    ("other layers", 1.5, "", False),
    ("all-gather", 1.15, GREEN, True),
    ("backward", 1.1, GREY, True),
    ("reduce-scatter", 1.45, PURPLE, True),
    ("free", 0.55, ORANGE, False),
]
_HOOKS = {
    0: "forward pre-hook",
    2: "forward hook",
    4: "backward pre-hook",
    6: "hook on the weight",
}


def life_of_a_layer() -> Picture:
    """Draw one step of a layer on two ranks: what it does, and how much of it a rank holds."""
    title = "The weight is gathered twice per step; in between a rank holds only its part"
    ax = canvas(2.9, title)
    x, level = 1.05, [2.1, 1.6]  # of a part, and of all
    write_left(ax, 0.95, "does", weight="bold", size=11)
    write_left(ax, level[1], "all of it", **SMALL)
    write_left(ax, level[0], "1 / 2 of it", **SMALL)
    xs, ys = [x], [level[0]]
    for number, (name, width, colour, whole) in enumerate(_LIFE):
        if colour:
            box(ax, (x, 0.78), (width - 0.05, 0.34), name, colour, size=10)
        else:
            write_text(ax, x + width / 2 - 0.03, 0.95, name, color=GREY, **SMALL)
        if hook := _HOOKS.get(number):
            write_text(ax, x, 0.6, hook, ha="left", color=GREY, **SMALL)
        xs += [x, x + width]
        ys += [level[whole]] * 2
        x += width
    ax.plot(xs, ys, color=BLUE, linewidth=2.5)
    ax.fill_between(xs, ys, 2.6, color=BLUE, alpha=0.12, linewidth=0)
    note = "The line: how much of this layer's weight a rank holds. Widths are not times."
    write_left(ax, 2.75, note, color=GREY, **SMALL)
    words = ", ".join(name for name, *_ in _LIFE)
    return described(ax.figure, f"{title}. In order: {words}, on each of 2 ranks.")


# ---- the two sums of tensor parallel


def two_sums() -> Picture:
    """Draw two layers sharded over two ranks, and the messages forward and backward."""
    title = "Forward adds up where the output leaves, backward where the input enters"
    ax = canvas(3.1, title)
    box(ax, (0.1, 1.5), (0.6, 0.4), "x")
    box(ax, (8.75, 1.5), (0.6, 0.4), "y")
    for x, name in ((1.35, "enter"), (7.3, "add up")):
        box(ax, (x, 0.95), (0.85, 1.4), name, GREEN, weight="bold")
    for rank, y in enumerate((1.05, 1.8)):
        for x, text in ((3.0, f"rows of up, {rank}"), (5.1, f"columns of down, {rank}")):
            box(ax, (x, y), (1.75, 0.42), text, rank_colour(rank), size=10)
        for start, end in ((2.23, 2.97), (4.78, 5.07), (6.88, 7.27)):
            arrow(ax, (start, y + 0.21), (end, y + 0.21))
    arrow(ax, (0.73, 1.7), (1.32, 1.7))
    arrow(ax, (8.18, 1.7), (8.72, 1.7))
    for y, name, at_entry, at_exit in (
        (2.55, "forward", "nothing to send", "all-reduce of the output"),
        (2.82, "backward", "all-reduce of x's gradient", "nothing to send"),
    ):
        write_left(ax, y, name, weight="bold", size=10)
        write_text(ax, 1.35, y, at_entry, ha="left", **SMALL)
        write_text(ax, 8.15, y, at_exit, ha="right", **SMALL)
    alt = (
        f"{title}. x enters 2 ranks; each has rows of up and columns of down. Forward: nothing is "
        "sent where x enters, an all-reduce adds up the outputs. Backward: nothing is sent at the "
        "output, an all-reduce adds up the gradients of x."
    )
    return described(ax.figure, alt)


# ---- a pipeline, in two orders

_ORDERS = {"all forward, then all backward": False, "one forward, one backward": True}
_ROW = 0.4  # inches


def schedules(stages: int = 3, micro_batches: int = 4) -> Picture:
    """Draw both orders of a pipeline: which stage computes or waits when, and what each holds."""
    tables = {n: schedule(stages, micro_batches, order) for n, order in _ORDERS.items()}
    units = max(map(length, tables.values()))
    share = max(map(bubble, tables.values()))
    title = f"Both orders take {units} units, {share:.0%} of them waiting; the second holds less"
    block = 0.62 + _ROW * stages
    ax = canvas(0.55 + block * len(tables) + 0.2, title)
    sentences = []
    for number, (name, table) in enumerate(tables.items()):
        top = 0.55 + block * number
        write_left(ax, top + 0.12, name, weight="bold", size=11)
        write_text(ax, 9.4, top + 0.12, "most held", ha="right", **SMALL)
        for stage, works in enumerate(table):
            _draw_stage(ax, top + 0.32 + _ROW * stage, stage, works, units)
        held = ", ".join(str(most_held(works)) for works in table)
        sentences.append(f"{name}: the stages hold at most {held} micro-batches at once.")
    note = "A number: the micro-batch. Pale: forward, 1 unit. Strong: backward, 2. White: waits. "
    note += "Held: between forward and backward."
    write_left(ax, 0.5 + block * len(tables), note, color=GREY, **SMALL)
    words = f"{title}. {stages} stages, {micro_batches} micro-batches. {' '.join(sentences)}"
    return described(ax.figure, words)


def _draw_stage(ax: Axes, y: float, stage: int, works: list[Work], units: int) -> None:
    """Draw the row of a stage: its name, its works, and how many micro-batches it holds."""
    left, right = 0.95, 8.6
    unit = (right - left) / units
    write_left(ax, y + 0.16, f"stage {stage}", **SMALL)
    for work in works:
        corner = left + unit * work.start, y
        size = unit * UNITS[work.kind] - 0.03, 0.32
        fill = 0.2 if work.kind == FORWARD else 0.6
        box(ax, corner, size, work.micro_batch, rank_colour(stage), fill=fill, size=10)
    write_text(ax, 9.1, y + 0.16, most_held(works), weight="bold", **SMALL)
