"""Figures of notebook 03: ranks on the GPUs of nodes, and the way of a local rank to its GPU."""

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, cross_out, described, halo, link, pieces, write
from ddp_helpers.draw.style import CODE, GREY, LEFT, WRONG, rank_colour


def ranks_on_nodes(gpus_per_node: tuple[int, ...] = (4, 4), use: str = "local_rank") -> Picture:
    """Draw the GPU that each rank asks for with cuda:local_rank or, the mistake, with cuda:rank."""
    height, pitch = (1.65 if use == "local_rank" else 2.0), min(2.07, 8.25 / max(gpus_per_node))
    ax = canvas(0.55 + height * len(gpus_per_node), f"Every rank asks for cuda:{use}, as in data.to({use})")
    first, lost = 0, []
    for node, gpus in enumerate(gpus_per_node):
        ranks = range(first, first + gpus)
        devices = dict(zip(ranks, range(gpus) if use == "local_rank" else ranks, strict=True))
        lost += _node(ax, 0.55 + height * node, pitch, node, devices)
        first += gpus
    verdict = f"{_ranks(lost)} would fail: no such device" if lost else "every rank has its own GPU"
    nodes = " and ".join(map(str, gpus_per_node))
    return described(ax.figure, f"{first} ranks, nodes of {nodes} GPUs, each using cuda:{use}; {verdict}.")


def _node(ax: Axes, top: float, pitch: float, node: int, devices: dict[int, int]) -> list[int]:
    """A node with the device that each of its ranks asks for; gives the ranks that ask in vain."""
    gpus = len(devices)
    box(ax, (LEFT, top), (0.99 + gpus * pitch, 1.5), fill=0.06)
    write(ax, 0.58, top + 0.75, f"node {node}\n{gpus} GPU" + "s" * (gpus > 1), weight="bold")
    for local, (rank, device) in enumerate(devices.items()):
        corner, text = (1.05 + local * pitch, top + 0.12), f"rank {rank}\nlocal_rank {local}"
        _gpu(ax, corner, (pitch - 0.08, 1.26), text, rank, device, exists=device < gpus)
    lost = [rank for rank, device in devices.items() if device >= gpus]
    if lost:
        has = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        fault = f"{_ranks(lost)}: no such device, node {node} has only {has}"
        write(ax, 0.15, top + 1.72, fault, ha="left", color=WRONG, weight="bold")
    return lost


def _gpu(ax: Axes, corner: tuple, extent: tuple, text: str, rank: int, device: int, exists: bool) -> None:
    """A rank's box with the device it asks for, crossed out where the node has none such."""
    (x, y), (width, height) = corner, extent
    box(ax, corner, extent, colour=rank_colour(rank))
    write(ax, x + width / 2, y + 0.4, text, size=11.5 if width > 1.2 else 10)
    chip, size = (x + 0.08, y + height - 0.46), (width - 0.16, 0.38)
    box(ax, chip, size, f"cuda:{device}", GREY if exists else WRONG, fill=0, **halo("white"), **CODE)
    if not exists:
        cross_out(ax, chip, size)


def _ranks(ranks: list[int]) -> str:
    """Some ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def signal_path(local_rank: int = 2, gpus: int = 4) -> Picture:
    """Draw the local rank's way from the launcher to the device."""
    bottom, colour = max(3.35, 0.95 + 0.36 * gpus), rank_colour(local_rank)
    ax, middle = canvas(bottom + 0.2, "How a process finds its GPU"), (0.95 + bottom) / 2
    for x, heading in zip((0.65, 2.98, 6.2, 8.75), ("launcher", "environment", "script", "node"), strict=True):
        write(ax, x, 0.7, heading, weight="bold")
    calls = f"local_rank = {local_rank}\ntorch.cuda.set_device({local_rank})"
    script = box(ax, (4.95, middle - 0.4), (2.5, 0.8), calls, colour, **CODE)
    _launchers(ax, middle, local_rank)
    for gpu, (top, height) in enumerate(pieces(0.95, bottom, gpus, gap=0.1)):
        look = {"colour": colour, "weight": "bold"} if gpu == local_rank else {"fill": 0.05}
        device = box(ax, (8.15, top), (1.2, height), f"cuda:{gpu}", **look, **CODE)
        if gpu == local_rank:
            link(ax, script, device)
    return described(
        ax.figure,
        f"torchrun sets LOCAL_RANK={local_rank}, srun SLURM_LOCALID={local_rank}, mpirun OMPI_COMM_WORLD_LOCAL_RANK="
        f"{local_rank}; so the script works on cuda:{local_rank}, one of the {gpus} GPUs of its node.",
    )


def _launchers(ax: Axes, middle: float, local_rank: int) -> None:
    """Each launcher with the variable by which it tells a process its local rank."""
    launchers = {"torchrun": "LOCAL_RANK", "srun": "SLURM_LOCALID", "mpirun": "OMPI_COMM_WORLD_LOCAL_RANK"}
    for row, (launcher, variable) in enumerate(launchers.items()):
        y = middle + 0.85 * (row - 1)
        box(ax, (LEFT, y - 0.25), (1.1, 0.5), launcher, **CODE)
        arrow(ax, (1.22, y), (1.6, y))
        box(ax, (1.62, y - 0.25), (2.72, 0.5), f"{variable}={local_rank}", rank_colour(local_rank), **CODE)
        arrow(ax, (4.36, y), (4.93, middle + 0.2 * (row - 1)))
