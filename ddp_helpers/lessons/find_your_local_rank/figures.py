"""The figure of notebook 03: ranks on the GPUs of nodes.

The notebook calls it, in the driver process; it draws from its arguments alone.
"""

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, box, canvas, described, halo, write_text
from ddp_helpers.draw.style import CODE, GREY, LEFT, WRONG, rank_colour


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
        title = f"With cuda:rank, {len(failing)} of {count} ranks ask for a GPU that does not exist"
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
    """Draw the GPU that a rank asks for, crossed out if its node does not have it."""
    colour = WRONG if is_missing else GREY
    box(ax, (x, y), (width, 0.38), f"cuda:{device}", colour, fill=0, **halo("white"), **CODE)
    if is_missing:
        for heights in ((y, y + 0.38), (y + 0.38, y)):
            ax.plot((x, x + width), heights, color=WRONG, linewidth=2, alpha=0.5)
