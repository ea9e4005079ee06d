"""Figures of notebook 07: the way of a job through Slurm, and backfill.

The notebook draws them; they need no ranks.
"""

from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw import drawing
from ddp_helpers.draw.drawing import Picture, arrow, box, write_text
from ddp_helpers.draw.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LEFT,
    ORANGE,
    RIGHT,
    SMALL,
    rank_colour,
)

# In inches, as all places of a figure: where the row of boxes begins, and how high it is.
_TOP, _HEIGHT = 0.95, 2.1


class _Stop(NamedTuple):
    """A box on the way of a job."""

    left: float
    width: float
    title: str  # above it
    name: str
    contents: str


class _Step(NamedTuple):
    """An arrow from one box to the next."""

    left: float
    right: float
    label: str


_STOPS = [
    _Stop(LEFT, 1.5, "you", "notebook,\nlogin node", "the script\nthe job\nthe site"),
    _Stop(2.3, 1.5, "the file", "job.sbatch", "what is asked,\nthen what\nruns there"),
    _Stop(4.5, 1.4, "Slurm", "the queue", "pending,\nuntil nodes\nare free"),
]
_STEPS = [_Step(1.6, 2.3, "write"), _Step(3.8, 4.5, "sbatch"), _Step(5.9, 6.5, "start")]


def way_of_a_job(nodes: int = 2, tasks_per_node: int = 2) -> Picture:
    """Draw a job's way: written in the notebook, in the queue, on its nodes, kept as a record."""
    ranks = nodes * tasks_per_node
    ax = drawing.canvas(4.35, f"A job of {ranks} ranks waits until {nodes} nodes are free at once")
    for stop in _STOPS:
        box(ax, (stop.left, _TOP), (stop.width, _HEIGHT), fill=0.08)
        middle = stop.left + stop.width / 2
        write_text(ax, middle, _TOP - 0.2, stop.title, weight="bold")
        write_text(ax, middle, _TOP + 0.5, stop.name)
        write_text(ax, middle, _TOP + 1.35, stop.contents, **SMALL)
    for step in _STEPS:
        arrow(ax, (step.left + 0.03, _TOP + 1.05), (step.right - 0.03, _TOP + 1.05))
        write_text(ax, (step.left + step.right) / 2, _TOP + 0.88, step.label, **SMALL)
    _draw_nodes(ax, nodes, tasks_per_node)
    _draw_run_folder(ax)
    starts = f"on {nodes} nodes srun starts {tasks_per_node} tasks on each, ranks 0 to {ranks - 1}"
    before = "you write job.sbatch; it waits in Slurm's queue"
    after = "rank 0 writes the record; you read it"
    return drawing.described(ax.figure, f"A job's way: {before}; {starts}; {after}.")


def _draw_nodes(ax: Axes, nodes: int, tasks_per_node: int) -> None:
    """Draw the nodes of the job, each with a task for each of its GPUs."""
    write_text(ax, 7.95, _TOP - 0.2, "the nodes: srun starts a step", weight="bold")
    gap = 0.12
    height = (_HEIGHT + gap) / nodes - gap
    for node in range(nodes):
        top = _TOP + node * (height + gap)
        box(ax, (6.5, top), (2.9, height), fill=0.06, colour=GREY)
        write_text(ax, 6.87, top + height / 2, f"node\n{node + 1}", **SMALL)
        places = drawing.equal_parts(7.25, 9.3, tasks_per_node, gap=0.1)
        for local_rank, (left, width) in enumerate(places):
            rank = node * tasks_per_node + local_rank
            has_room = width > 0.7 and height > 0.6
            text = f"task {rank}\nGPU {local_rank}" if has_room else rank
            corner, extent = (left, top + 0.1), (width, height - 0.2)
            box(ax, corner, extent, text, rank_colour(rank), size=10)


def _draw_run_folder(ax: Axes) -> None:
    """Draw the run folder below the boxes, and who writes and reads it."""
    text = "on a disk that all nodes share: script, job.sbatch, the log, and the record of each run"
    bottom = _TOP + _HEIGHT
    box(ax, (LEFT, 3.65), (9.3, 0.5), text, INK, fill=0.1)
    arrow(ax, (7.95, bottom), (7.95, 3.63))
    arrow(ax, (0.85, 3.63), (0.85, bottom))
    write_text(ax, 8.05, bottom + 0.3, "rank 0 writes", ha="left", **SMALL)
    write_text(ax, 0.95, bottom + 0.3, "you read", ha="left", **SMALL)


def backfill(long: int = 10, short: int = 1) -> Picture:
    """Draw a plan for two nodes: A runs, B waits for both nodes, and C is short enough to pass it.

    long: minutes that A and B ask for; short: minutes that C asks for.
    """
    title = f"C, of {short} min, runs in the hole of {long} min that B's wait leaves"
    ax = drawing.canvas(3.1, title)
    left, height = 1.15, 0.7
    tops = (0.6, 1.45)  # of the two nodes
    end = 2 * long
    minute = (RIGHT - left) / end
    for node, top in enumerate(tops, start=1):
        write_text(ax, LEFT, top + 0.35, f"node {node}", ha="left", weight="bold")
        box(ax, (left + long * minute, top), (long * minute, height), "B", BLUE)
    box(ax, (left, tops[0]), (long * minute, height), "A runs", ORANGE)
    box(ax, (left, tops[1]), (short * minute, height), "C", GREEN)
    hole = (left + short * minute, tops[1])
    extent = ((long - short) * minute, height)
    box(ax, hole, extent, "idle: B needs both nodes", fill=0.03, line=":")
    ax.plot([left, RIGHT], [2.35, 2.35], color=INK, linewidth=1.2)
    for time in (0, long, end):
        x = left + time * minute
        ax.plot([x, x], [2.35, 2.43], color=INK, linewidth=1.2)
        write_text(ax, x, 2.6, f"{time} min", ha="right" if time == end else "center", **SMALL)
    source = "drawn from the times that the three jobs ask for; submitted in the order A, B, C"
    write_text(ax, LEFT, 2.93, source, ha="left", color=GREY, **SMALL)
    plan = f"A runs on node 1 for {long} min, B needs both from {long} to {end} min"
    alt = f"Two nodes over time: {plan}; C runs on node 2 for {short} min, before B."
    return drawing.described(ax.figure, alt)
