"""The figure of notebook 03: ranks on the GPUs of nodes.

The notebook calls it, in its own process; it draws from its arguments alone.
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
    halo,
    write_text,
)
from ddp_helpers.draw.style import CODE, GREY, LEFT, WRONG, rank_colour


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
