"""Notebook 07: the diagrams of a job's way through Slurm, and of backfill."""

from matplotlib.axes import Axes

from ddp_helpers.draw import drawing
from ddp_helpers.draw.drawing import Picture, arrow, box, write
from ddp_helpers.draw.style import BLUE, GREEN, GREY, INK, LEFT, ORANGE, RIGHT, SMALL, rank_colour

TOP, TALL = 0.95, 2.1  # where the row of boxes begins, and how high it is


def way_of_a_job(nodes: int = 2, tasks_per_node: int = 2) -> Picture:
    """Draw a job's way: written in the notebook, waiting in the queue, running on its nodes, kept as a record."""
    ax = drawing.canvas(4.35, f"A job of {nodes * tasks_per_node} ranks waits until {nodes} nodes are free at once")
    stops = [
        (LEFT, 1.5, "you", "notebook,\nlogin node", "the script\nthe job\nthe site"),
        (2.3, 1.5, "the file", "job.sbatch", "what is asked,\nthen what\nruns there"),
        (4.5, 1.4, "Slurm", "the queue", "pending,\nuntil nodes\nare free"),
    ]
    for left, width, title, name, what in stops:
        box(ax, (left, TOP), (width, TALL), fill=0.08)
        write(ax, left + width / 2, TOP - 0.2, title, weight="bold")
        write(ax, left + width / 2, TOP + 0.5, name)
        write(ax, left + width / 2, TOP + 1.35, what, **SMALL)
    for left, right, text in ((1.6, 2.3, "write"), (3.8, 4.5, "sbatch"), (5.9, 6.5, "start")):
        arrow(ax, (left + 0.03, TOP + 1.05), (right - 0.03, TOP + 1.05))
        write(ax, (left + right) / 2, TOP + 0.88, text, **SMALL)
    _nodes(ax, nodes, tasks_per_node)
    kept = "the run folder: record, log, script and job.sbatch, on a disk that all nodes share"
    box(ax, (LEFT, 3.65), (9.3, 0.5), kept, INK, fill=0.1)
    arrow(ax, (7.95, TOP + TALL), (7.95, 3.63))
    arrow(ax, (0.85, 3.63), (0.85, TOP + TALL))
    write(ax, 8.05, TOP + TALL + 0.3, "rank 0 writes", ha="left", **SMALL)
    write(ax, 0.95, TOP + TALL + 0.3, "you read", ha="left", **SMALL)
    starts = f"on {nodes} nodes srun starts {tasks_per_node} tasks on each, ranks 0 to {nodes * tasks_per_node - 1}"
    way = f"you write job.sbatch; it waits in Slurm's queue; {starts}; rank 0 writes the record; you read it"
    return drawing.described(ax.figure, f"A job's way: {way}.")


def _nodes(ax: Axes, nodes: int, tasks_per_node: int) -> None:
    """The nodes of the job, each with a task for each of its GPUs."""
    write(ax, 7.95, TOP - 0.2, "the nodes: srun starts a step", weight="bold")
    high = (TALL + 0.12) / nodes - 0.12
    for node in range(nodes):
        y = TOP + node * (high + 0.12)
        box(ax, (6.5, y), (2.9, high), fill=0.06, colour=GREY)
        write(ax, 6.87, y + high / 2, f"node\n{node + 1}", **SMALL)
        for local, (left, width) in enumerate(drawing.pieces(7.25, 9.3, tasks_per_node, gap=0.1)):
            rank = node * tasks_per_node + local
            text = f"task {rank}\nGPU {local}" if width > 0.7 and high > 0.6 else rank
            box(ax, (left, y + 0.1), (width, high - 0.2), text, rank_colour(rank), size=10)


def backfill(long: int = 10, short: int = 1) -> Picture:
    """Draw the plan for two nodes: A runs for so many minutes, B needs both nodes, and C is short enough to pass it."""
    title = f"C, of {short} min, runs in the hole of {long} min that B's wait leaves"
    ax, left, end = drawing.canvas(3.1, title), 1.15, 2 * long
    minute = (RIGHT - left) / end
    for node, y in ((1, 0.6), (2, 1.45)):
        write(ax, LEFT, y + 0.35, f"node {node}", ha="left", weight="bold")
        box(ax, (left + long * minute, y), (long * minute, 0.7), "B", BLUE)
    box(ax, (left, 0.6), (long * minute, 0.7), "A runs", ORANGE)
    box(ax, (left, 1.45), (short * minute, 0.7), "C", GREEN)
    hole = (left + short * minute, 1.45)
    box(ax, hole, ((long - short) * minute, 0.7), "idle: B needs both nodes", fill=0.03, line=":")
    ax.plot([left, RIGHT], [2.35, 2.35], color=INK, linewidth=1.2)
    for at in (0, long, end):
        ax.plot([left + at * minute] * 2, [2.35, 2.43], color=INK, linewidth=1.2)
        write(ax, left + at * minute, 2.6, f"{at} min", ha="right" if at == end else "center", **SMALL)
    caption = "drawn from the times that the three jobs ask for; submitted in the order A, B, C"
    write(ax, LEFT, 2.93, caption, ha="left", color=GREY, **SMALL)
    plan = f"A runs on node 1 for {long} min, B needs both from {long} to {end} min"
    return drawing.described(ax.figure, f"Two nodes over time: {plan}; C runs on node 2 for {short} min, before B.")
