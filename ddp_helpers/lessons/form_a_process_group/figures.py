"""Figures of notebook 02: one program on every rank, the collectives, the ring, a barrier."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, pieces, write
from ddp_helpers.draw.style import GREY, INK, LEFT, MINUS, RIGHT, SMALL, TIMES, WRONG, rank_colour
from ddp_helpers.lessons.form_a_process_group.exercises import barrier_waits


def spmd(world_size: int = 4) -> Picture:
    """One script, many processes: what differs between the ranks, and what all-reduce makes equal again."""
    gradients = [2 * rank + 1 for rank in range(world_size)]
    mean, weight, rate = sum(gradients) / world_size, 10, 0.5
    after, terms = weight - rate * mean, " + ".join(map(str, gradients))
    ax = canvas(6.35, "One program, many processes: different data, the same weights")
    box(ax, (2.3, 0.5), (7.1, 0.42), f"one script, started {world_size} times")
    for rank, (left, width) in enumerate(pieces(2.3, RIGHT, world_size)):
        arrow(ax, (left + width / 2, 0.95), (left + width / 2, 1.25))
        box(ax, (left, 1.27), (width, 4.95), colour=rank_colour(rank), fill=0.04)
        write(ax, left + width / 2, 1.5, f"rank {rank}", weight="bold")
        arrow(ax, (left + width / 2, 3.72), (left + width / 2, 3.99))
    _row(ax, 1.75, "data", [f"shard {rank}" for rank in range(world_size)], own=True)
    _row(ax, 2.5, "forward, backward", [f"w = {weight}"] * world_size)
    _row(ax, 3.25, "gradient", [f"g = {gradient}" for gradient in gradients], own=True)
    _row(ax, 4.75, "averaged gradient", [f"g = {mean:g}"] * world_size)
    _row(ax, 5.5, f"step: w {MINUS} {rate} {TIMES} g", [f"w = {after:g}"] * world_size)
    box(ax, (2.2, 4.0), (7.25, 0.46), f"all-reduce:  ({terms}) / {world_size} = {mean:g}", INK, fill=0.12)
    return described(
        ax.figure,
        f"One script as {world_size} processes, each with its own shard. All-reduce turns their gradients into one "
        f"mean, ({terms}) / {world_size} = {mean:g}, which takes each replica from weight {weight} to {after:g}.",
    )


def _row(ax: Axes, y: float, label: str, texts: list[str], own: bool = False) -> None:
    """One stage of every rank's work: in the rank's colour where it is its own, grey where all agree."""
    write(ax, LEFT, y + 0.12, label, ha="left", weight="bold")
    write(ax, LEFT, y + 0.36, "each rank its own" if own else "the same on all ranks", ha="left", **SMALL)
    for rank, (left, width) in enumerate(pieces(2.3, RIGHT, len(texts))):
        colour, font = rank_colour(rank) if own else GREY, 11.5 if width > 1 else 10
        box(ax, (left + 0.06, y), (width - 0.12, 0.46), texts[rank], colour, size=font)
        if label != "data":  # the first row has nothing above it to come from
            arrow(ax, (left + width / 2, y - 0.29), (left + width / 2, y), shrinkA=1, shrinkB=1)


def collectives(world_size: int = 4) -> Picture:
    """Draw what each collective leaves on every rank, before and after, in numbers."""
    panels, sums = _exchanges(world_size)
    across, height = 2 if world_size <= 4 else 1, 0.95 + 0.4 * world_size
    ax = canvas(0.7 + height * 4 / across, f"Four collectives on {world_size} ranks: before → after")
    for number, (name, (effect, before, after)) in enumerate(panels.items()):
        left, width = pieces(LEFT, RIGHT, across, gap=0.4)[number % across]
        top, middle = 0.5 + height * (number // across), left + 0.32 + width / 2
        write(ax, left, top + 0.2, name, ha="left", weight="bold", family="monospace")
        write(ax, left, top + 0.46, effect, ha="left")
        for rank in range(world_size):
            y = top + 0.85 + 0.4 * rank
            write(ax, left, y, f"rank {rank}", ha="left", **SMALL)
            _cells(ax, left + 0.65, middle - 0.2, y, before[rank])
            arrow(ax, (middle - 0.15, y), (middle + 0.15, y))
            _cells(ax, middle + 0.2, left + width, y, after[rank])
    key = "Colour: the rank that held the number. Grey: a sum over all ranks. Dotted: empty."
    write(ax, LEFT, 0.5 + height * 4 / across, key, ha="left", **SMALL)
    return described(
        ax.figure,
        f"Before and after on {world_size} ranks: broadcast copies rank 0's numbers to all, all_reduce leaves the sums "
        f"{sums} on every rank, reduce_scatter one of them on each, and all_gather puts every rank's part on all.",
    )


def _exchanges(world_size: int) -> tuple[dict[str, tuple], str]:
    """For each collective its effect and all ranks' cells, (number, rank it came from), before and after."""
    ranks = range(world_size)
    own = [[((rank + 1) * (place + 1), rank) for place in ranks] for rank in ranks]
    sums = [sum(number for number, _ in column) for column in zip(*own, strict=True)]
    summed, held = [(number, None) for number in sums], list(zip(sums, ranks, strict=True))

    def scattered(cells: list[tuple]) -> list[list]:
        return [[cells[place] if place == rank else None for place in ranks] for rank in ranks]

    return {
        "broadcast": ("every rank gets rank 0's numbers", own, [own[0]] * world_size),
        "all_reduce": ("every rank gets every sum", own, [summed] * world_size),
        "reduce_scatter": ("each rank gets the sum of one part", own, scattered(summed)),
        "all_gather": ("every rank gets every rank's part", scattered(held), [held] * world_size),
    }, ", ".join(map(str, sums))


def _cells(ax: Axes, left: float, right: float, y: float, cells: list[tuple | None]) -> None:
    """One rank's numbers in a row."""
    for cell, (x, width) in zip(cells, pieces(left, right, len(cells), gap=0.04), strict=True):
        number, owner = cell or ("", None)
        look = {"fill": 0.25, "line": "-"} if cell else {"fill": 0.03, "line": ":"}
        colour = GREY if owner is None else rank_colour(owner)
        box(ax, (x, y - 0.17), (width, 0.34), number, colour, **look, **SMALL)


def ring(world_size: int = 4) -> Picture:
    """Draw an all-reduce around a ring, step by step: the pieces are added up, then the sums are handed round."""
    steps = world_size - 1
    title = f"Ring all-reduce on {world_size} ranks: 2 {TIMES} {steps} steps, each rank sends one piece a step"
    held = [[1] * world_size for _ in range(world_size)]
    strips = [("start", {}, [list(row) for row in held])]
    for phase, first in (("add", 0), ("hand round", 1)):
        for step in range(1, world_size):
            arrived = {rank: (rank + first - step) % world_size for rank in range(world_size)}
            for rank, piece in arrived.items():
                held[rank][piece] = world_size if first else step + 1
            strips.append((f"{phase}, step {step}", arrived, [list(row) for row in held]))
    ax = canvas(0.7 + 2 * (0.75 + 0.42 * world_size), title)
    for number, strip in enumerate(strips):
        across = pieces(LEFT, RIGHT, world_size, gap=0.3)[number % world_size]
        _strip(ax, across, 0.7 + (0.75 + 0.42 * world_size) * (number // world_size), *strip)
    key = "row: a rank\ncolumn: a piece\nnumber: ranks added up\ndark: the sum of all\nred line: has just arrived"
    left, _ = pieces(LEFT, RIGHT, world_size, gap=0.3)[-1]
    write(ax, left, 0.7 + 0.75 + 0.42 * world_size + 0.9, key, ha="left", **SMALL)
    alt = f"{title}. After {steps} steps each rank has one whole sum, after {2 * steps} all of them."
    return described(ax.figure, alt)


def _strip(ax: Axes, across: tuple[float, float], top: float, name: str, arrived: dict, held: list[list[int]]) -> None:
    """One step of the ring: what each rank holds of each piece, and what has just arrived."""
    write(ax, across[0], top, name, ha="left", weight="bold")
    for rank, row in enumerate(held):
        y = top + 0.25 + 0.42 * rank
        write(ax, across[0], y + 0.16, rank, ha="left", **SMALL)
        for piece, (x, width) in enumerate(pieces(across[0] + 0.2, sum(across), len(row), gap=0.05)):
            whole = row[piece] == len(row)
            look = {"fill": 0.85, "color": "white"} if whole else {"fill": 0.12 + 0.15 * (row[piece] - 1)}
            box(ax, (x, y), (width, 0.32), row[piece], INK if whole else rank_colour(rank), **look, **SMALL)
            if arrived.get(rank) == piece:
                ax.plot([x + 0.05, x + width - 0.05], [y + 0.36] * 2, color=WRONG, linewidth=2.5)


def barrier_lanes(arrival: Sequence[float]) -> Picture:
    """Draw each rank's time before a barrier and in it, from the seconds at which the ranks enter it."""
    waits, scale = barrier_waits(arrival), (RIGHT - 1.1) / max(arrival)
    latest = arrival.index(max(arrival))
    ax = canvas(
        0.95 + 0.5 * len(arrival), f"Rank {latest} comes last: the others wait {sum(waits):g} s for it, together"
    )
    for rank, (seconds, waited) in enumerate(zip(arrival, waits, strict=True)):
        y = 0.55 + 0.5 * rank
        write(ax, LEFT, y + 0.2, f"rank {rank}", ha="left")
        enters = 1.1 + scale * seconds
        if seconds:
            box(ax, (1.1, y), (scale * seconds, 0.4), f"{seconds:g} s before it", rank_colour(rank))
        if waited:
            box(ax, (enters, y), (scale * waited, 0.4), f"{waited:g} s in the barrier", fill=0.05, hatch="//")
    ax.plot([RIGHT] * 2, [0.5, 0.6 + 0.5 * len(arrival)], color=INK, linewidth=2)
    write(ax, RIGHT, 0.75 + 0.5 * len(arrival), "all leave", ha="right", **SMALL)
    return described(ax.figure, f"Seconds in the barrier: {', '.join(f'rank {r} {w:g}' for r, w in enumerate(waits))}.")
