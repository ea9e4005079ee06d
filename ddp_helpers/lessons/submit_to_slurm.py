"""Notebook 07: its exercises, and the diagram of a job's way through Slurm."""

import re

from matplotlib.axes import Axes

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.notebook.drawing import (
    GREY,
    INK,
    LEFT,
    SMALL,
    Picture,
    arrow,
    box,
    canvas,
    described,
    pieces,
    rank_colour,
    write,
)


def nodes_for(gpus: int, per_node: int) -> tuple[int, int]:
    """(nodes, GPUs on each): the fewest nodes that share so many GPUs equally."""
    return next(
        (nodes, gpus // nodes) for nodes in range(1, gpus + 1) if gpus % nodes == 0 and gpus <= nodes * per_node
    )


def tasks_on_nodes(text: str) -> list[int]:
    """The number of tasks on each node, from what SLURM_TASKS_PER_NODE says."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def idle_gpus(lines: list[str]) -> int:
    """GPUs of a job that have no task, over all its nodes; negative where tasks must share GPUs."""
    asked = dict(line.split()[1].lstrip("-").split("=") for line in lines if line.startswith("#SBATCH"))
    each = int(asked["gres"].split(":")[-1]) - int(asked["ntasks-per-node"])
    return int(asked["nodes"]) * each


def first_to_fail(log: list[str]) -> tuple[int, int] | None:
    """(task, exit code) of the first task that the log reports as exited; None if there is none."""
    found = re.search(r"task (\d+): Exited with exit code (\d+)", "\n".join(log))
    return (int(found[1]), int(found[2])) if found else None


def _exits(log: list[str]) -> list[tuple[int, int]]:
    found = re.findall(r"task (\d+): Exited with exit code (\d+)", "\n".join(log))
    return [(int(task), int(code)) for task, code in found]


def _job(nodes: int, tasks: int, gres: str) -> list[str]:
    lines = ["#!/bin/bash", f"#SBATCH --nodes={nodes}", f"#SBATCH --ntasks-per-node={tasks}   # one for each GPU"]
    return [*lines, f"#SBATCH --gres={gres}", "srun python mnist_ddp.py"]


OTHERS = ["srun: error: node1: task 0: Terminated", "srun: error: node2: tasks 2-3: Terminated"]
SEVEN = ["1: nothing to train on", "srun: error: node1: task 1: Exited with exit code 7"]

EXERCISES = [
    Exercise(
        nodes_for,
        [(4, 4), (4, 2), (6, 4), (12, 8), (2, 8), (7, 4)],
        {
            "Nodes times GPUs is more than was asked for, and all of them are paid for.": lambda gpus, per_node: (
                -(-gpus // per_node),
                min(gpus, per_node),
            ),
            "Nodes times GPUs is less than was asked for: the nodes must divide it.": lambda gpus, per_node: (
                -(-gpus // per_node),
                gpus // -(-gpus // per_node),
            ),
            "One GPU on each node sends every message over the network: fill a node first.": lambda gpus, _: (gpus, 1),
        },
    ),
    Exercise(
        tasks_on_nodes,
        [("4",), ("2(x2)",), ("2(x2),1",), ("8(x3),4(x2)",), ("12,4",)],
        {
            "(x2) says that two nodes in a row have this number.": lambda text: [
                int(part.split("(")[0]) for part in text.split(",")
            ],
            "The tasks of different nodes are not added up: each node has a place in the list.": lambda text: [
                int(tasks) * int(times or 1) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
            ],
        },
    ),
    Exercise(
        idle_gpus,
        [(_job(2, 2, "gpu:2"),), (_job(2, 1, "gpu:4"),), (_job(1, 2, "gpu:a100:4"),), (_job(3, 4, "gpu:2"),)],
        {
            "That is one node: every node of the job has as many.": lambda lines: (
                idle_gpus(lines) // int(lines[1].split("=")[1])
            ),
            "More tasks than GPUs is a mistake as well: say so with a negative number.": lambda lines: max(
                0, idle_gpus(lines)
            ),
        },
    ),
    Exercise(
        first_to_fail,
        [
            (SEVEN + OTHERS,),
            (OTHERS,),
            ([OTHERS[0], *SEVEN, "srun: error: node2: task 3: Exited with exit code 9"],),
            ([*SEVEN, "srun: error: node2: task 12: Exited with exit code 1"],),
        ],
        {
            "The last one that complains may only have lost its peers: take the first.": lambda log: (
                _exits(log)[-1] if _exits(log) else None
            ),
            "The largest code is Slurm's choice for the job: take the first task that exited.": lambda log: max(
                _exits(log), key=lambda found: found[1], default=None
            ),
        },
    ),
]


TOP, TALL = 0.95, 2.1  # where the row of boxes begins, and how high it is


def way_of_a_job(nodes: int = 2, tasks_per_node: int = 2) -> Picture:
    """Draw a job's way: written in the notebook, waiting in the queue, running on its nodes, kept as a record."""
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
