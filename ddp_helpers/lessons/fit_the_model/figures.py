"""The figure of notebook 14 that shows who holds what: a replica, and what ZeRO cuts of it.

The notebook calls it, in its own process; it draws from its arguments alone.
"""

from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, box, canvas, described, write_text
from ddp_helpers.draw.style import GREY, LEFT, RIGHT, SMALL
from ddp_helpers.lessons.side_by_side import KINDS

_CUTS: dict[str, list[str]] = {  # by method, the kinds of which each of two ranks holds half
    "DDP": [],
    "ZeRO": ["optimizer state"],
    "FSDP2": ["parameters", "gradients", "optimizer state"],
}
_GATHER = "FSDP2 gathers a layer to compute it, tensor parallel never does."


def _share(method: str, kind: str) -> float:
    """Return the share of a kind of memory that each of two ranks holds."""
    return 0.5 if kind in _CUTS[method] else 1.0


def who_holds(held: dict[str, float]) -> Picture:
    """Draw what each of two ranks keeps between steps, by method, with shards cut evenly.

    held: the bytes of a replica, by kind.
    """
    kept = {}  # MB, by method
    for method in _CUTS:
        kept[method] = sum(_share(method, kind) * size for kind, size in held.items()) / 1e6
    zero, fsdp = (f"{kept[method] / kept['DDP']:.0%}" for method in ("ZeRO", "FSDP2"))
    title = f"Each of 2 ranks keeps {zero} of DDP's memory with ZeRO, {fsdp} with FSDP2"
    ax = canvas(4.55, title)
    for row, method in enumerate(_CUTS):
        top = 0.95 + 1.15 * row
        y = top + (0.21 if method == "FSDP2" else 0.42)  # FSDP2 has a second line below it
        write_text(ax, LEFT, y, method, ha="left", weight="bold")
        _draw_holdings(ax, top, method, held)
        for rank in (0, 1):
            y = top + 0.19 + 0.46 * rank
            write_text(ax, 1.75, y, f"rank {rank}", ha="right", **SMALL)
            write_text(ax, RIGHT, y, f"{kept[method]:.0f} MB", ha="right", weight="bold")
    for x, width, kind in _columns(held):
        write_text(ax, x + width / 2, 0.72, kind, size=11)
    write_text(ax, LEFT, 3.79, "tensor parallel,\nwhere it cuts", ha="left", **SMALL)
    note = f"Computed, float32 with Adam. Dotted: on the other rank. {_GATHER}"
    write_text(ax, LEFT, 4.35, note, ha="left", color=GREY, **SMALL)
    sizes = ", ".join(f"{method} {size:.0f} MB" for method, size in kept.items())
    cuts = "ZeRO cuts the optimizer state, FSDP2 all three kinds"
    return described(ax.figure, f"{title}: {sizes}. {cuts}. {_GATHER}")


class _Column(NamedTuple):
    """Where a kind of memory is drawn."""

    x: float
    width: float
    kind: str


def _columns(held: dict[str, float]) -> list[_Column]:
    """List where each kind is drawn, as wide as it is large. held: bytes by kind."""
    scale = 6.3 / sum(held.values())
    columns, x = [], 1.9
    for kind, size in held.items():
        columns.append(_Column(x, size * scale, kind))
        x += size * scale
    return columns


def _draw_holdings(ax: Axes, top: float, method: str, held: dict[str, float]) -> None:
    """Draw what the two ranks hold with a method, one below the other. held: bytes by kind."""
    for x, width, kind in _columns(held):
        share = _share(method, kind)
        size = share * held[kind]
        label = f"{size / 1e6:,.1f} MB" if held[kind] < 1e8 else f"{size / 1e6:,.0f} MB"
        for rank in (0, 1):
            y = top + 0.46 * rank
            shard_x = x + (1 - share) * width * rank
            box(ax, (x, y), (width - 0.08, 0.38), line=":", fill=0)
            box(ax, (shard_x, y), (share * width - 0.08, 0.38), label, KINDS[kind], size=10)
