"""The figures of notebook 03: ranks on the GPUs of nodes, and a batch script with its steps.

The notebook calls them, in its own process; they draw from their arguments alone.
"""

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, box, canvas, described, equal_parts, halo, write_text
from ddp_helpers.draw.style import CODE, GREY, INK, LEFT, RIGHT, SMALL, WRONG, rank_colour

# ---- ranks on the GPUs of nodes


def ranks_on_nodes(gpus_per_node: tuple[int, ...] = (4, 4), use: str = "local_rank") -> Picture:
    """Draw the GPU that each rank asks for.

    use: "local_rank" for cuda:local_rank, or "rank" for the mistake, cuda:rank.
    """
    places = [(node, place) for node, gpus in enumerate(gpus_per_node) for place in range(gpus)]
    devices = [place if use == "local_rank" else rank for rank, (_, place) in enumerate(places)]
    failing = [
        rank for rank, (node, _) in enumerate(places) if devices[rank] >= gpus_per_node[node]
    ]
    count = len(places)
    title = f"{count} ranks, {count} GPUs: the local rank starts again on each node"
    verdict = "every rank has its own GPU"
    if failing:
        title = f"With cuda:rank, {len(failing)} of {count} ranks ask for a GPU that is not there"
        verdict = f"ranks {', '.join(map(str, failing))} would fail: no such device"
    pitch = min(2.07, 8.25 / max(gpus_per_node))
    height = 2.0 if failing else 1.65
    ax = canvas(0.55 + height * len(gpus_per_node), title)
    for node, gpus in enumerate(gpus_per_node):
        top = 0.55 + height * node
        box(ax, (LEFT, top), (0.99 + gpus * pitch, 1.5), fill=0.06)
        write_text(ax, 0.58, top + 0.75, f"node {node}\nGPUs: {gpus}", weight="bold")
        if vain := [str(rank) for rank in failing if places[rank][0] == node]:
            fault = f"ranks {', '.join(vain)}: no such device, the last here is cuda:{gpus - 1}"
            write_text(ax, 0.15, top + 1.72, fault, ha="left", color=WRONG, weight="bold")
    for rank, (node, local_rank) in enumerate(places):
        x, y = 1.05 + local_rank * pitch, 0.67 + height * node
        box(ax, (x, y), (pitch - 0.08, 1.26), colour=rank_colour(rank))
        numbers, size = f"rank {rank}\nlocal_rank {local_rank}", 11.5 if pitch > 1.28 else 10
        write_text(ax, x + pitch / 2 - 0.04, y + 0.4, numbers, size=size)
        _draw_device(ax, x + 0.08, y + 0.8, pitch - 0.24, devices[rank], rank in failing)
    nodes = " and ".join(map(str, gpus_per_node))
    return described(
        ax.figure, f"{count} ranks, nodes of {nodes} GPUs, each using cuda:{use}; {verdict}."
    )


def _draw_device(ax: Axes, x: float, y: float, width: float, device: int, is_missing: bool) -> None:
    """Draw the GPU that a rank asks for, crossed out where its node has none such."""
    colour = WRONG if is_missing else GREY
    box(ax, (x, y), (width, 0.38), f"cuda:{device}", colour, fill=0, **halo("white"), **CODE)
    if is_missing:
        for heights in ((y, y + 0.38), (y + 0.38, y)):
            ax.plot((x, x + width), heights, color=WRONG, linewidth=2, alpha=0.5)


# ---- a batch script and its steps

# The lines of a batch script, and what each prints in a job of two nodes with two tasks each.
JOB = (
    "echo $SLURM_PROCID",
    'srun bash -c "echo $SLURM_PROCID"',
    "srun bash -c 'echo $SLURM_PROCID'",
)
PRINTED = ("0", "0 0 0 0", "0 1 2 3")
_MOMENTS = [  # what the job shows, its line, what the batch script does, what each task is told
    (
        "Slurm runs the batch script once, on the first node; its number is 0",
        0,
        "runs: echo 0",
        "",
    ),
    (
        "Double quotes: the batch script fills in its own 0, before the step begins",
        1,
        'runs: srun bash -c "echo 0"',
        "",
    ),
    (
        "So each of the four tasks is told to print 0, whatever its own number",
        1,
        "waits for the step to end",
        "echo 0",
    ),
    (
        "Single quotes: the batch script passes the name on, and fills in nothing",
        2,
        f"runs: {JOB[2]}",
        "",
    ),
    (
        "Single quotes: each of the four tasks fills in its own number, its rank",
        2,
        "waits for the step to end",
        "echo $SLURM_PROCID",
    ),
]


def moments_of_a_job() -> list[Picture]:
    """Draw the moments of the job one by one, to be stepped through."""
    return [batch_script_and_step(moment) for moment in range(1, len(_MOMENTS) + 1)]


def batch_script_and_step(moment: int = len(_MOMENTS)) -> Picture:
    """Draw who runs at a moment of the job, from 1 on, and who fills in `$SLURM_PROCID`."""
    title, line, script, told = _MOMENTS[moment - 1]
    printed = line + bool(told or line == 0)  # so many lines have their result
    ax = canvas(4.6, title)
    box(ax, (LEFT, 0.53 + 0.42 * line), (9.3, 0.4), colour=INK, fill=0.12)
    for number, command in enumerate(JOB):
        write_text(ax, 0.25, 0.73 + 0.42 * number, command, ha="left", **CODE)
    for number, text in enumerate(PRINTED[:printed]):
        write_text(ax, 5.1, 0.73 + 0.42 * number, f"prints {text}", ha="left", weight="bold")
    for node, (left, width) in enumerate(equal_parts(LEFT, RIGHT, 2)):
        box(ax, (left, 2.0), (width, 2.5), fill=0.06)
        write_text(ax, left + 0.42, 2.38, f"node {node}", weight="bold")
    box(
        ax,
        (0.95, 2.1),
        (3.65, 0.58),
        f"batch script, SLURM_PROCID=0\n{script}",
        INK,
        fill=0.12,
        **CODE,
    )
    for task, x in enumerate((0.2, 2.445, 4.91, 7.155)):
        if not told:
            box(ax, (x, 2.8), (2.145, 1.6), "no task", fill=0, line=":", **SMALL)
            continue
        box(ax, (x, 2.8), (2.145, 1.6), colour=rank_colour(task))
        write_text(ax, x + 1.0725, 3.07, f"task {task}", weight="bold")
        write_text(ax, x + 1.0725, 3.58, f"SLURM_PROCID={task}\ntold:\n{told}", **CODE)
        text = f"prints {PRINTED[line].split()[task]}"
        write_text(ax, x + 1.0725, 4.15, text, weight="bold")
    step = f"a step of 4 tasks on 2 nodes, each told: {told}" if told else "no step"
    prints = f"; it prints {PRINTED[line]}" if printed > line else ""
    name = f"Moment {moment} of {len(_MOMENTS)}"
    return described(ax.figure, f"{name}, {JOB[line]}: {title}; {step}{prints}.")
