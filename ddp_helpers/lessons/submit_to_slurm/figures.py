"""Figures of notebook 07: the way of a job through Slurm, and backfill.

The notebook draws them; they need no ranks.
"""

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
from ddp_helpers.draw.style import BLUE, GREEN, GREY, INK, LEFT, ORANGE, RIGHT, SMALL, rank_colour

_STOPS = [  # a box: its left edge, what stands above it, its name, its contents; the way from it
    (LEFT, "you", "notebook,\nlogin node", "the script\nthe job\nthe site", "write"),
    (2.3, "the file", "job.sbatch", "what is asked,\nthen what\nruns there", "sbatch"),
    (4.5, "Slurm", "the queue", "pending,\nuntil nodes\nare free", "start"),
]


def way_of_a_job(nodes: int = 2, tasks_per_node: int = 2) -> Picture:
    """Draw a job's way: written in the notebook, in the queue, on its nodes, kept as a record."""
    ranks = nodes * tasks_per_node
    ax = canvas(4.35, f"A job of {ranks} ranks waits until {nodes} nodes are free at once")
    for left, title, name, contents, way in _STOPS:
        box(ax, (left, 0.95), (1.5, 2.1), fill=0.08)
        write_text(ax, left + 0.75, 0.75, title, weight="bold")
        write_text(ax, left + 0.75, 1.45, name)
        write_text(ax, left + 0.75, 2.3, contents, **SMALL)
        arrow(ax, (left + 1.53, 2.0), (left + 2.17, 2.0))
        write_text(ax, left + 1.85, 1.83, way, **SMALL)
    write_text(ax, 8.05, 0.75, "the nodes: srun starts a step", weight="bold")
    for node, (top, height) in enumerate(equal_parts(0.95, 3.05, nodes)):
        box(ax, (6.7, top), (2.7, height), fill=0.06)
        write_text(ax, 7.02, top + height / 2, f"node\n{node + 1}", **SMALL)
        for local_rank, (left, width) in enumerate(equal_parts(7.35, 9.3, tasks_per_node, 0.1)):
            rank = node * tasks_per_node + local_rank
            text = f"task {rank}\nGPU {local_rank}" if width > 0.7 and height > 0.6 else rank
            box(ax, (left, top + 0.1), (width, height - 0.2), text, rank_colour(rank), size=10)
    disk = "on a disk that all nodes share: script, job.sbatch, the log, and the record of each run"
    box(ax, (LEFT, 3.65), (9.3, 0.5), disk, INK, fill=0.1)
    arrow(ax, (7.95, 3.05), (7.95, 3.63))
    arrow(ax, (0.85, 3.63), (0.85, 3.05))
    write_text(ax, 8.05, 3.35, "rank 0 writes", ha="left", **SMALL)
    write_text(ax, 0.95, 3.35, "you read", ha="left", **SMALL)
    starts = f"on {nodes} nodes srun starts {tasks_per_node} tasks on each, ranks 0 to {ranks - 1}"
    before = "you write job.sbatch; it waits in Slurm's queue"
    after = "rank 0 writes the record; you read it"
    return described(ax.figure, f"A job's way: {before}; {starts}; {after}.")


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
