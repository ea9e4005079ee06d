"""The way of a job: from the notebook through Slurm's queue to the nodes, and its record back."""

from matplotlib.axes import Axes

from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import LEFT, SMALL, arrow, box, canvas, pieces, write
from ddp_helpers.notebook.style import GREY, INK, rank_colour

TOP, TALL = 0.95, 2.1  # where the row of boxes begins, and how high it is


def way_of_a_job(nodes: int = 2, tasks_per_node: int = 2) -> Picture:
    """Where a job passes: written in the notebook, waiting in the queue, running on its nodes, kept as a record."""
    ax = canvas(4.35, "The way of a job")
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
    box(
        ax,
        (LEFT, 3.65),
        (9.3, 0.5),
        "the run folder: record, log, script and job.sbatch, on a disk that all nodes share",
        INK,
        fill=0.1,
    )
    arrow(ax, (7.95, TOP + TALL), (7.95, 3.63))
    arrow(ax, (0.85, 3.63), (0.85, TOP + TALL))
    write(ax, 8.05, TOP + TALL + 0.3, "rank 0 writes", ha="left", **SMALL)
    write(ax, 0.95, TOP + TALL + 0.3, "you read", ha="left", **SMALL)
    return described(
        ax.figure,
        "A job is written in the notebook as a file, job.sbatch. sbatch puts it into Slurm's queue, where it is "
        f"pending until {nodes} nodes are free. There srun starts {tasks_per_node} tasks on each, ranks 0 to "
        f"{nodes * tasks_per_node - 1}. Rank 0 writes the record to the run folder, on a shared disk; you read it.",
    )


def _nodes(ax: Axes, nodes: int, tasks_per_node: int) -> None:
    """The nodes of the job, each with a task for each of its GPUs."""
    write(ax, 7.95, TOP - 0.2, "the nodes: srun starts a step", weight="bold")
    high = (TALL + 0.12) / nodes - 0.12
    for node in range(nodes):
        y = TOP + node * (high + 0.12)
        box(ax, (6.5, y), (2.9, high), fill=0.06, colour=GREY)
        write(ax, 6.87, y + high / 2, f"node\n{node + 1}", **SMALL)
        for local, (left, width) in enumerate(pieces(7.25, 9.3, tasks_per_node, gap=0.1)):
            rank = node * tasks_per_node + local
            text = f"task {rank}\nGPU {local}" if width > 0.7 and high > 0.6 else rank
            box(ax, (left, y + 0.1), (width, high - 0.2), text, rank_colour(rank), size=10)
