"""The figures of notebook 03: ranks on the GPUs of nodes, and a batch script with its steps.

The notebook calls them, in its own process; they draw from their arguments alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import (
    Picture,
    Point,
    box,
    canvas,
    cross_out,
    described,
    equal_parts,
    halo,
    write_text,
)
from ddp_helpers.draw.style import CODE, GREY, INK, LEFT, RIGHT, SMALL, WRONG, rank_colour

# ---- ranks on the GPUs of nodes


class _RankOnNode(NamedTuple):
    """A rank, its number on its node, and the index of the device that it asks for."""

    rank: int
    local_rank: int
    device: int


def ranks_on_nodes(gpus_per_node: tuple[int, ...] = (4, 4), use: str = "local_rank") -> Picture:
    """Draw the GPU that each rank asks for.

    use: "local_rank" for cuda:local_rank, or "rank" for the mistake, cuda:rank.
    """
    pitch = min(2.07, 8.25 / max(gpus_per_node))
    height = 1.65 if use == "local_rank" else 2.0
    ax = canvas(0.55 + height * len(gpus_per_node), _title_of_ranks(gpus_per_node, use))
    world_size, failing = 0, []
    for node, gpus in enumerate(gpus_per_node):
        ranks = [
            _RankOnNode(rank, local_rank, local_rank if use == "local_rank" else rank)
            for local_rank, rank in enumerate(range(world_size, world_size + gpus))
        ]
        failing += _draw_node(ax, 0.55 + height * node, pitch, node, ranks)
        world_size += gpus
    verdict = "every rank has its own GPU"
    if failing:
        verdict = f"{_ranks_text(failing)} would fail: no such device"
    nodes = " and ".join(map(str, gpus_per_node))
    return described(
        ax.figure,
        f"{world_size} ranks, nodes of {nodes} GPUs, each using cuda:{use}; {verdict}.",
    )


def _title_of_ranks(gpus_per_node: Sequence[int], use: str) -> str:
    """Compose what the picture shows: each rank with a GPU, or those that ask in vain."""
    if use == "local_rank":
        world_size = sum(gpus_per_node)
        return f"{world_size} ranks, {world_size} GPUs: the local rank starts again on each node"
    vain = sum(min(gpus, sum(gpus_per_node[:node])) for node, gpus in enumerate(gpus_per_node))
    return f"With cuda:rank, {vain} of {sum(gpus_per_node)} ranks ask for a GPU that is not there"


def _draw_node(
    ax: Axes,
    top: float,
    pitch: float,
    node: int,
    ranks: Sequence[_RankOnNode],
) -> list[int]:
    """Draw a node, which has a GPU for each of its ranks; return the ranks that ask in vain."""
    gpus = len(ranks)
    box(ax, (LEFT, top), (0.99 + gpus * pitch, 1.5), fill=0.06)
    name = f"node {node}\n{gpus} GPU{'s' * (gpus > 1)}"
    write_text(ax, 0.58, top + 0.75, name, weight="bold")
    for rank in ranks:
        corner = 1.05 + rank.local_rank * pitch, top + 0.12
        _draw_rank(ax, corner, (pitch - 0.08, 1.26), rank, exists=rank.device < gpus)
    failing = [rank.rank for rank in ranks if rank.device >= gpus]
    if failing:
        devices = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        fault = f"{_ranks_text(failing)}: no such device, node {node} has only {devices}"
        write_text(ax, 0.15, top + 1.72, fault, ha="left", color=WRONG, weight="bold")
    return failing


def _draw_rank(ax: Axes, corner: Point, extent: Point, rank: _RankOnNode, exists: bool) -> None:
    """Draw a rank with the device that it asks for, crossed out where the node has none such."""
    (x, y), (width, height) = corner, extent
    box(ax, corner, extent, colour=rank_colour(rank.rank))
    numbers = f"rank {rank.rank}\nlocal_rank {rank.local_rank}"
    write_text(ax, x + width / 2, y + 0.4, numbers, size=11.5 if width > 1.2 else 10)
    chip, chip_size = (x + 0.08, y + height - 0.46), (width - 0.16, 0.38)
    colour = GREY if exists else WRONG
    box(ax, chip, chip_size, f"cuda:{rank.device}", colour, fill=0, **halo("white"), **CODE)
    if not exists:
        cross_out(ax, chip, chip_size)


def _ranks_text(ranks: list[int]) -> str:
    """Compose a text of some ranks, as in rank 4, or ranks 4, 5."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# ---- a batch script and its steps

# The lines of a batch script, and what each prints in a job of two nodes with two tasks each.
JOB = (
    "echo $SLURM_PROCID",
    'srun bash -c "echo $SLURM_PROCID"',
    "srun bash -c 'echo $SLURM_PROCID'",
)
PRINTED = ("0", "0 0 0 0", "0 1 2 3")


class _Moment(NamedTuple):
    """A moment of the job: what it shows, the line that runs, and what everybody does."""

    title: str
    line: int  # of JOB
    script: str  # what the batch script does
    command: str = ""  # what each task of a step is to run; nothing where there is no step
    prints: bool = True  # whether this line's result is there


_MOMENTS = [
    _Moment(
        "Slurm runs the batch script once, on the first node; its number is 0", 0, "runs: echo 0"
    ),
    _Moment(
        "Double quotes: the batch script fills in its own 0, before the step begins",
        1,
        'runs: srun bash -c "echo 0"',
        prints=False,
    ),
    _Moment(
        "So each of the four tasks is told to print 0, whatever its own number",
        1,
        "waits for the step to end",
        command="echo 0",
    ),
    _Moment(
        "Single quotes: the batch script passes the name on, and fills in nothing",
        2,
        f"runs: {JOB[2]}",
        prints=False,
    ),
    _Moment(
        "Single quotes: each of the four tasks fills in its own number, its rank",
        2,
        "waits for the step to end",
        command="echo $SLURM_PROCID",
    ),
]


def moments_of_a_job() -> list[Picture]:
    """Draw the moments of the job one by one, to be stepped through."""
    return [batch_script_and_step(moment) for moment in range(1, len(_MOMENTS) + 1)]


def batch_script_and_step(moment: int = len(_MOMENTS)) -> Picture:
    """Draw who runs at a moment of the job, from 1 on, and who fills in `$SLURM_PROCID`."""
    now = _MOMENTS[moment - 1]
    ax = canvas(4.6, now.title)
    _draw_job(ax, now)
    for node, (left, width) in enumerate(equal_parts(LEFT, RIGHT, 2)):
        box(ax, (left, 2.0), (width, 2.5), fill=0.06)
        write_text(ax, left + 0.42, 2.38, f"node {node}", weight="bold")
        if node == 0:
            text = f"batch script, SLURM_PROCID=0\n{now.script}"
            box(ax, (left + 0.85, 2.1), (3.65, 0.58), text, INK, fill=0.12, **CODE)
        for local_rank, (start, extent) in enumerate(
            equal_parts(left + 0.1, left + width - 0.1, 2, gap=0.1)
        ):
            _draw_task(ax, (start, 2.8), (extent, 1.6), 2 * node + local_rank, now)
    step = f"a step of 4 tasks on 2 nodes, each told: {now.command}" if now.command else "no step"
    printed = f"; it prints {PRINTED[now.line]}" if now.prints else ""
    number = f"Moment {moment} of {len(_MOMENTS)}"
    return described(ax.figure, f"{number}, {JOB[now.line]}: {now.title}; {step}{printed}.")


def _draw_job(ax: Axes, now: _Moment) -> None:
    """Draw the batch script's lines, the one that runs framed, and what has been printed."""
    for line, (command, printed) in enumerate(zip(JOB, PRINTED, strict=True)):
        y = 0.73 + 0.42 * line
        if line == now.line:
            box(ax, (LEFT, y - 0.2), (9.3, 0.4), colour=INK, fill=0.12)
        write_text(ax, 0.25, y, command, ha="left", **CODE)
        if line < now.line or (line == now.line and now.prints):
            write_text(ax, 5.1, y, f"prints {printed}", ha="left", weight="bold")


def _draw_task(ax: Axes, corner: Point, extent: Point, rank: int, now: _Moment) -> None:
    """Draw a task of the step, or its empty place."""
    if not now.command:
        box(ax, corner, extent, "no task", fill=0, line=":", **SMALL)
        return
    number = PRINTED[now.line].split()[rank]
    (x, y), (width, _) = corner, extent
    box(ax, corner, extent, colour=rank_colour(rank))
    write_text(ax, x + width / 2, y + 0.27, f"task {rank}", weight="bold")
    text = f"SLURM_PROCID={rank}\ntold:\n{now.command}"
    write_text(ax, x + width / 2, y + 0.78, text, **CODE)
    write_text(ax, x + width / 2, y + 1.35, f"prints {number}", weight="bold")
