"""The figures of notebook 02: one program on every rank, and the collectives.

The notebook calls them, in the driver process; they draw from their arguments alone.
"""

from collections.abc import Sequence

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
from ddp_helpers.draw.style import GREY, INK, LEFT, MINUS, RIGHT, SMALL, TIMES, rank_colour

# ---- one program on every rank

_RATE = 0.5
_OWN, _SAME = "each rank its own", "the same on all ranks"
_STAGES = {  # inches from the top: what each rank has there, and whether it differs by rank
    1.75: ("weights", _SAME),
    2.5: ("data", _OWN),
    3.25: ("gradient", _OWN),
    4.75: ("averaged gradient", _SAME),
    5.5: (f"step: w {MINUS} {_RATE} {TIMES} g", _SAME),
}


def spmd(world_size: int = 4) -> Picture:
    """Draw one script as many processes: what differs by rank, and what all-reduce makes equal."""
    gradients = [2 * rank + 1 for rank in range(world_size)]
    mean, weight = sum(gradients) / world_size, 10
    weight_after = weight - _RATE * mean
    ax = canvas(6.35, "One program, many processes: different data, the same weights")
    box(ax, (2.3, 0.5), (7.1, 0.42), f"one script, started {world_size} times")
    for y, (label, note) in _STAGES.items():
        write_left(ax, y + 0.12, label, weight="bold")
        write_left(ax, y + 0.36, note, **SMALL)
    for rank, (left, width) in enumerate(equal_parts(2.3, RIGHT, world_size)):
        middle = left + width / 2
        box(ax, (left, 1.27), (width, 4.95), colour=rank_colour(rank), fill=0.04)
        write_text(ax, middle, 1.5, f"rank {rank}", weight="bold")
        for y in (0.96, 2.21, 2.96, 3.71, 4.46, 5.21):
            arrow(ax, (middle, y), (middle, y + 0.28))
        texts = [f"w = {weight}", f"shard {rank}", f"g = {gradients[rank]}"]
        texts += [f"g = {mean:g}", f"w = {weight_after:g}"]
        for (y, (_, note)), text in zip(_STAGES.items(), texts, strict=True):
            colour = rank_colour(rank) if note == _OWN else GREY
            box(ax, (left + 0.06, y), (width - 0.12, 0.46), text, colour)
    quotient = f"({' + '.join(map(str, gradients))}) / {world_size} = {mean:g}"
    box(ax, (2.2, 4.0), (7.25, 0.46), f"all-reduce and a division:  {quotient}", INK, fill=0.12)
    return described(
        ax.figure,
        f"One script as {world_size} processes, each with its own shard. All-reduce turns their "
        f"gradients into one mean, {quotient}, which takes each replica from weight {weight} to "
        f"{weight_after:g}.",
    )


# ---- the collectives

_Cell = tuple[int, str] | None  # a number and its colour; None is an empty cell
_Cells = Sequence[Sequence[_Cell]]  # by rank and part


def collectives(world_size: int = 4) -> Picture:
    """Draw what each of four collectives leaves on every rank, before and after, in numbers."""
    ranks = range(world_size)
    own = [[((rank + 1) * (part + 1), rank_colour(rank)) for part in ranks] for rank in ranks]
    sums = [sum(number for number, _ in part) for part in zip(*own, strict=True)]
    summed = [(number, GREY) for number in sums]
    parts = [(number, rank_colour(rank)) for rank, number in enumerate(sums)]
    panels: dict[
        str, tuple[str, _Cells, _Cells]
    ] = {  # what each does, and the cells of all ranks, before and after
        "broadcast": ("every rank gets rank 0's numbers", own, [own[0]] * world_size),
        "all_reduce": ("every rank gets every sum", own, [summed] * world_size),
        "reduce_scatter": ("each rank gets the sum of one part", own, _one_each(summed)),
        "all_gather": ("every rank gets every rank's part", _one_each(parts), [parts] * world_size),
    }
    height = 0.95 + 0.4 * world_size
    title = f"{world_size} ranks: reduce_scatter, then all_gather, make an all_reduce"
    ax = canvas(0.7 + 2 * height, title)
    for number, (name, (effect, before, after)) in enumerate(panels.items()):
        left, top = LEFT + 4.85 * (number % 2), 0.5 + height * (number // 2)
        write_text(ax, left, top + 0.2, name, ha="left", weight="bold", family="monospace")
        write_text(ax, left, top + 0.46, effect, ha="left")
        for rank in ranks:
            y = top + 0.85 + 0.4 * rank
            write_text(ax, left, y, f"rank {rank}", ha="left", **SMALL)
            _draw_cells(ax, left + 0.65, y, before[rank])
            arrow(ax, (left + 2.4, y), (left + 2.7, y))
            _draw_cells(ax, left + 2.75, y, after[rank])
    key = "Colour: the rank that held the number. Grey: a sum over all ranks. Dotted: empty."
    write_left(ax, 0.5 + 2 * height, key, **SMALL)
    return described(
        ax.figure,
        f"Before and after on {world_size} ranks: broadcast copies rank 0's numbers to all, "
        f"all_reduce leaves the sums {', '.join(map(str, sums))} on every rank, reduce_scatter "
        "one of them on each, and all_gather puts every rank's part on all.",
    )


def _one_each(cells: Sequence[_Cell]) -> _Cells:
    """Give each rank the cell of its own number, and leave the others empty."""
    ranks = range(len(cells))
    return [[cells[rank] if part == rank else None for part in ranks] for rank in ranks]


def _draw_cells(ax: Axes, left: float, y: float, cells: Sequence[_Cell]) -> None:
    """Draw one rank's numbers in a row."""
    for cell, (x, width) in zip(
        cells, equal_parts(left, left + 1.7, len(cells), 0.04), strict=True
    ):
        text, colour = cell or ("", GREY)
        fill, line = (0.25, "-") if cell else (0.03, ":")
        box(ax, (x, y - 0.17), (width, 0.34), text, colour, fill=fill, line=line, **SMALL)
