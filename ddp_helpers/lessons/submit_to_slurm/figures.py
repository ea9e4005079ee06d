"""The figure of notebook 07: the way of a job through Slurm.

The notebook draws it; it needs no ranks.
"""

from ddp_helpers.draw.drawing import (
    Picture,
    arrow,
    box,
    canvas,
    described,
    equal_parts,
    write_text,
)
from ddp_helpers.draw.style import INK, LEFT, SMALL, rank_colour

_STOPS = [  # a box: its left edge, the text above it, its name, its contents; the step after it
    (LEFT, "you", "notebook,\nlogin node", "the script\nthe job\nthe site", "write"),
    (2.3, "the file", "job.sbatch", "the request,\nthen the\ncommands", "sbatch"),
    (4.5, "Slurm", "the queue", "pending,\nuntil nodes\nare free", "start"),
]


def way_of_a_job(nodes: int = 2, tasks_per_node: int = 2) -> Picture:
    """Draw the stages of a job: in the notebook, in the queue, on its nodes, and its record."""
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
    return described(ax.figure, f"The stages of a job: {before}; {starts}; {after}.")
