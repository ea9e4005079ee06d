"""The figures of notebook 08: strong and weak scaling as bricks, and backfill.

The notebook calls them, in the driver process; they draw from their arguments alone.
"""

import itertools
import math
from collections.abc import Sequence

from ddp_helpers.draw.drawing import Picture, box, canvas, described, write_left, write_text
from ddp_helpers.draw.style import BLUE, GREEN, GREY, INK, ORANGE, RIGHT, SMALL, rank_colour
from ddp_helpers.records.scaling import counted

# ---- strong and weak, as bricks


def bricks(images: int, batch: int, sizes: Sequence[int]) -> Picture:
    """Draw the steps of an epoch for each number of ranks, one brick per step and rank.

    batch: divided among the ranks on the left (strong), per rank on the right (weak).
    """
    steps, most = images // batch, max(sizes)
    title = f"Strong divides a batch: always {steps} steps. "
    title += f"Weak adds batches: {math.ceil(steps / most)} steps on {most} ranks"
    heights = [max(0.55, 0.3 * size) for size in sizes]
    ax = canvas(1.15 + sum(heights) + 0.25 * len(sizes), title)
    write_text(ax, 1.2, 0.75, f"strong: {batch} images per step", ha="left", weight="bold")
    write_text(ax, 5.5, 0.75, f"weak: {batch} images per step and rank", ha="left", weight="bold")
    top = 1.0
    for size, height in zip(sizes, heights, strict=True):
        middle = top + height / 2
        write_left(ax, middle, counted(size, "rank"))
        for left, columns, brick in ((1.2, steps, 0.3 / size), (5.5, math.ceil(steps / size), 0.3)):
            for step, rank in itertools.product(range(columns), range(size)):
                corner = left + step * 3.65 / steps, middle + (rank - size / 2) * brick
                extent = 3.65 / steps - 0.03, brick - 0.02
                box(ax, corner, extent, colour=rank_colour(rank), fill=0.55)
        top += height + 0.25
    alt = f"Bricks, one per step and rank. {title}. The area is the same everywhere."
    return described(ax.figure, alt)


# ---- backfill


def backfill(long: int = 10, short: int = 1) -> Picture:
    """Draw a plan for two nodes: A runs, B waits for both nodes, and C is short enough to pass it.

    long: minutes that A and B ask for; short: minutes that C asks for.
    """
    ax = canvas(3.1, f"C came last, but its {short} min fit into the {long} before B can start")
    minute = 4.125 / long  # inches
    for node, top in enumerate((0.6, 1.45), start=1):
        write_left(ax, top + 0.35, f"node {node}", weight="bold")
        box(ax, (5.275, top), (4.125, 0.7), "B", BLUE)
    box(ax, (1.15, 0.6), (4.125, 0.7), "A runs", ORANGE)
    box(ax, (1.15, 1.45), (short * minute, 0.7), "C", GREEN)
    hole = (1.15 + short * minute, 1.45), ((long - short) * minute, 0.7)
    box(ax, *hole, "idle: B needs both nodes", fill=0.03, line=":")
    ax.plot([1.15, RIGHT], [2.35, 2.35], color=INK, linewidth=1.2)
    for time, x, side in ((0, 1.15, "center"), (long, 5.275, "center"), (2 * long, RIGHT, "right")):
        ax.plot([x, x], [2.35, 2.43], color=INK, linewidth=1.2)
        write_text(ax, x, 2.6, f"{time} min", ha=side, **SMALL)
    source = "drawn from the times that the three jobs ask for; submitted in the order A, B, C"
    write_left(ax, 2.93, source, color=GREY, **SMALL)
    plan = f"A runs on node 1 for {long} min, B needs both from {long} to {2 * long} min"
    alt = f"Two nodes over time: {plan}; C runs on node 2 for {short} min, before B."
    return described(ax.figure, alt)
