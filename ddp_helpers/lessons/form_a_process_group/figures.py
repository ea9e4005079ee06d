"""The figures of notebook 02: one program on every rank, the collectives, the ring.

The notebook calls them, in its own process; they draw from their arguments alone.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, equal_parts, write_text
from ddp_helpers.draw.style import GREY, INK, LEFT, MINUS, RIGHT, SMALL, TIMES, rank_colour

# ---- one program on every rank

_RANKS_LEFT = 2.3  # inches: where the ranks begin, right of the names of the stages


def spmd(world_size: int = 4) -> Picture:
    """Draw one script as many processes: what differs by rank, and what all-reduce makes equal."""
    gradients = [2 * rank + 1 for rank in range(world_size)]
    mean, weight, rate = sum(gradients) / world_size, 10, 0.5
    weight_after = weight - rate * mean
    terms = " + ".join(map(str, gradients))
    ax = canvas(6.35, "One program, many processes: different data, the same weights")
    box(ax, (_RANKS_LEFT, 0.5), (7.1, 0.42), f"one script, started {world_size} times")
    for rank, (left, width) in enumerate(equal_parts(_RANKS_LEFT, RIGHT, world_size)):
        middle = left + width / 2
        arrow(ax, (middle, 0.95), (middle, 1.25))
        box(ax, (left, 1.27), (width, 4.95), colour=rank_colour(rank), fill=0.04)
        write_text(ax, middle, 1.5, f"rank {rank}", weight="bold")
        arrow(ax, (middle, 3.72), (middle, 3.99))
    shards = [f"shard {rank}" for rank in range(world_size)]
    _stage(ax, 1.75, "weights", [f"w = {weight}"] * world_size, first=True)
    _stage(ax, 2.5, "data", shards, by_rank=True)
    _stage(ax, 3.25, "gradient", [f"g = {gradient}" for gradient in gradients], by_rank=True)
    _stage(ax, 4.75, "averaged gradient", [f"g = {mean:g}"] * world_size)
    step = f"step: w {MINUS} {rate} {TIMES} g"
    _stage(ax, 5.5, step, [f"w = {weight_after:g}"] * world_size)
    quotient = f"({terms}) / {world_size} = {mean:g}"
    box(ax, (2.2, 4.0), (7.25, 0.46), f"all-reduce and a division:  {quotient}", INK, fill=0.12)
    return described(
        ax.figure,
        f"One script as {world_size} processes, each with its own shard. All-reduce turns their "
        f"gradients into one mean, {quotient}, which takes each replica from weight {weight} to "
        f"{weight_after:g}.",
    )


def _stage(
    ax: Axes,
    y: float,
    label: str,
    texts: Sequence[str],
    by_rank: bool = False,
    first: bool = False,
) -> None:
    """Draw a stage of every rank's work, with an arrow to it from the stage above.

    by_rank: each rank has a text of its own, and its colour; else all agree, in grey.
    """
    write_text(ax, LEFT, y + 0.12, label, ha="left", weight="bold")
    note = "each rank its own" if by_rank else "the same on all ranks"
    write_text(ax, LEFT, y + 0.36, note, ha="left", **SMALL)
    for rank, (left, width) in enumerate(equal_parts(_RANKS_LEFT, RIGHT, len(texts))):
        colour = rank_colour(rank) if by_rank else GREY
        size = 11.5 if width > 1 else 10
        box(ax, (left + 0.06, y), (width - 0.12, 0.46), texts[rank], colour, size=size)
        if not first:
            middle = left + width / 2
            arrow(ax, (middle, y - 0.29), (middle, y), shrinkA=1, shrinkB=1)


# ---- the collectives


class _Cell(NamedTuple):
    """A number, and the rank that held it at first; None for a sum over all ranks."""

    number: int
    owner: int | None


_Cells = list[_Cell | None]  # of one rank; None is an empty cell


class _Collective(NamedTuple):
    """A collective, what it does, and the cells of each rank before and after it."""

    name: str
    effect: str
    before: list[_Cells]
    after: list[_Cells]


def collectives(world_size: int = 4) -> Picture:
    """Draw what each of four collectives leaves on every rank, before and after, in numbers."""
    columns = 2 if world_size <= 4 else 1
    height = 0.95 + 0.4 * world_size
    bottom = 0.5 + height * 4 / columns
    title = f"{world_size} ranks: reduce_scatter, then all_gather, make an all_reduce"
    ax = canvas(bottom + 0.2, title)
    panels = equal_parts(LEFT, RIGHT, columns, gap=0.4)
    for number, collective in enumerate(_four_collectives(world_size)):
        row, column = divmod(number, columns)
        left, width = panels[column]
        _draw_collective(ax, left, width, 0.5 + height * row, collective)
    key = "Colour: the rank that held the number. Grey: a sum over all ranks. Dotted: empty."
    write_text(ax, LEFT, bottom, key, ha="left", **SMALL)
    sums = ", ".join(str(cell.number) for cell in _sums(_numbers(world_size)))
    return described(
        ax.figure,
        f"Before and after on {world_size} ranks: broadcast copies rank 0's numbers to all, "
        f"all_reduce leaves the sums {sums} on every rank, reduce_scatter one of them on each, "
        "and all_gather puts every rank's part on all.",
    )


def _numbers(world_size: int) -> list[list[_Cell]]:
    """Give every rank as many numbers as there are ranks."""
    ranks = range(world_size)
    return [[_Cell((rank + 1) * (part + 1), rank) for part in ranks] for rank in ranks]


def _sums(numbers: list[list[_Cell]]) -> list[_Cell]:
    """Add up each part's numbers over the ranks."""
    parts = zip(*numbers, strict=True)
    return [_Cell(sum(cell.number for cell in part), None) for part in parts]


def _four_collectives(world_size: int) -> list[_Collective]:
    """Compute what each collective does."""
    ranks = range(world_size)
    numbers = _numbers(world_size)
    sums = _sums(numbers)
    by_rank: list[_Cells] = [list(cells) for cells in numbers]
    scattered_sums = [_only(sums, rank) for rank in ranks]
    owned_sums = [_Cell(cell.number, rank) for rank, cell in enumerate(sums)]
    owned_parts = [_only(owned_sums, rank) for rank in ranks]
    return [
        _Collective(
            "broadcast",
            "every rank gets rank 0's numbers",
            before=by_rank,
            after=[by_rank[0]] * world_size,
        ),
        _Collective(
            "all_reduce",
            "every rank gets every sum",
            before=by_rank,
            after=[list(sums)] * world_size,
        ),
        _Collective(
            "reduce_scatter",
            "each rank gets the sum of one part",
            before=by_rank,
            after=scattered_sums,
        ),
        _Collective(
            "all_gather",
            "every rank gets every rank's part",
            before=owned_parts,
            after=[list(owned_sums)] * world_size,
        ),
    ]


def _only(cells: list[_Cell], rank: int) -> _Cells:
    """Keep the part of one rank, and leave the others empty."""
    return [cell if part == rank else None for part, cell in enumerate(cells)]


def _draw_collective(
    ax: Axes,
    left: float,
    width: float,
    top: float,
    collective: _Collective,
) -> None:
    """Draw a panel: the name, the effect, and each rank's cells before and after."""
    middle = left + 0.32 + width / 2
    write_text(ax, left, top + 0.2, collective.name, ha="left", weight="bold", family="monospace")
    write_text(ax, left, top + 0.46, collective.effect, ha="left")
    both = zip(collective.before, collective.after, strict=True)
    for rank, (before, after) in enumerate(both):
        y = top + 0.85 + 0.4 * rank
        write_text(ax, left, y, f"rank {rank}", ha="left", **SMALL)
        _draw_cells(ax, left + 0.65, middle - 0.2, y, before)
        arrow(ax, (middle - 0.15, y), (middle + 0.15, y))
        _draw_cells(ax, middle + 0.2, left + width, y, after)


def _draw_cells(ax: Axes, left: float, right: float, y: float, cells: _Cells) -> None:
    """Draw one rank's numbers in a row."""
    for cell, (x, width) in zip(cells, equal_parts(left, right, len(cells), gap=0.04), strict=True):
        corner, extent = (x, y - 0.17), (width, 0.34)
        if cell is None:
            box(ax, corner, extent, "", GREY, fill=0.03, line=":", **SMALL)
        else:
            colour = GREY if cell.owner is None else rank_colour(cell.owner)
            box(ax, corner, extent, cell.number, colour, **SMALL)


# ---- the ring


class _RingStep(NamedTuple):
    """A step of the ring: its name, the piece that each rank has just got, and the numbers.

    held[rank][piece]: of how many ranks' numbers this rank has the sum.
    """

    name: str
    arrived: dict[int, int]
    held: list[list[int]]


def _ring_steps(world_size: int) -> Iterator[_RingStep]:
    """Take the steps of a ring all-reduce, the state at the start first."""
    held = [[1] * world_size for _ in range(world_size)]
    yield _RingStep("start", {}, [list(counts) for counts in held])
    for phase, offset in (("add", 0), ("hand round", 1)):
        for step in range(1, world_size):
            arrived = {rank: (rank + offset - step) % world_size for rank in range(world_size)}
            for rank, piece in arrived.items():
                held[rank][piece] = step + 1 if phase == "add" else world_size
            copies = [list(counts) for counts in held]
            yield _RingStep(f"{phase}, step {step}", arrived, copies)


def ring_step(number: int, world_size: int = 4) -> Picture:
    """Draw one step of the ring: which piece each rank sends on, and what the receiver then has.

    number: of the step, from 0, the start, to 2 * (world_size - 1).
    """
    rounds = world_size - 1
    step = list(_ring_steps(world_size))[number]
    if not number:
        finding = f"Start: each rank has {world_size} pieces, and only its own numbers"
    elif number < rounds:
        finding = f"Step {number}: each rank adds the piece that arrives to its own"
    elif number == rounds:
        finding = f"Step {number}: now each rank has the whole sum of one piece"
    elif number < 2 * rounds:
        finding = f"Step {number}: a whole sum arrives, and takes the place of the old piece"
    else:
        finding = f"Step {number}: every rank has every sum"
    bottom = 1.0 + 0.55 * world_size
    ax = canvas(bottom + 0.75, finding)
    columns = equal_parts(1.35, 8.75, world_size, gap=0.75)
    for piece in range(world_size):
        write_text(ax, LEFT, 1.2 + 0.55 * piece, f"piece {piece}", ha="left", **SMALL)
    for rank, (left, width) in enumerate(columns):
        write_text(ax, left + width / 2, 0.75, f"rank {rank}", weight="bold")
        for piece, count in enumerate(step.held[rank]):
            y = 1.0 + 0.55 * piece
            summed = "+".join(str((rank - added) % world_size) for added in reversed(range(count)))
            if count == world_size:
                box(ax, (left, y), (width, 0.4), "all", INK, fill=0.85, color="white", **SMALL)
            else:
                fill = 0.12 + 0.15 * (count - 1)
                box(ax, (left, y), (width, 0.4), summed, rank_colour(rank), fill=fill, **SMALL)
            if step.arrived.get(rank) == piece:
                start = left - 0.72 if rank else left - 0.45
                arrow(ax, (start, y + 0.2), (left - 0.03, y + 0.2), linewidth=2.5)
                if not rank:  # it comes from the last rank, round the page
                    end = sum(columns[-1])
                    arrow(ax, (end + 0.03, y + 0.2), (end + 0.45, y + 0.2), linewidth=2.5)
    counter = f"sent so far by each rank: {number} of {2 * rounds} pieces, "
    counter += f"{number / world_size:g} {TIMES} its tensor"
    key = "in a box: the ranks whose numbers are added up; the last rank sends to rank 0"
    write_text(ax, LEFT, bottom + 0.2, counter, ha="left", weight="bold")
    write_text(ax, LEFT, bottom + 0.5, key, ha="left", **SMALL)
    return described(ax.figure, f"{finding}; {counter}.")
