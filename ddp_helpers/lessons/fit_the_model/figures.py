"""The figure of notebook 14 that shows who holds what: a replica, and its shards with ZeRO.

The notebook calls it, in the driver process; it draws from its arguments alone.
"""

from ddp_helpers.draw.drawing import Picture, box, canvas, described, write_left, write_text
from ddp_helpers.draw.style import GREY, RIGHT, SMALL
from ddp_helpers.lessons.side_by_side import KINDS

_CUTS: dict[str, list[str]] = {  # by method, the kinds of which each of two ranks holds half
    "DDP": [],
    "ZeRO-1": ["optimizer state"],
    "FSDP2": ["parameters", "gradients", "optimizer state"],
}
_GATHER = "FSDP2 gathers a layer to compute it, tensor parallel never does."


def who_holds(held: dict[str, float]) -> Picture:
    """Draw what each of two ranks keeps between steps, by method, with equal shards.

    held: the bytes of a replica, by kind.
    """
    kept = {}  # bytes, by method
    for method, cuts in _CUTS.items():
        kept[method] = sum(size / (1 + (kind in cuts)) for kind, size in held.items())
    zero, fsdp = (f"{kept[method] / kept['DDP']:.0%}" for method in ("ZeRO-1", "FSDP2"))
    title = f"Each of 2 ranks keeps {zero} of DDP's memory with ZeRO-1, {fsdp} with FSDP2"
    ax = canvas(4.55, title)
    for (method, cuts), top in zip(_CUTS.items(), (0.95, 2.1, 3.25), strict=True):
        # FSDP2 has a second line below it.
        y = top + (0.21 if method == "FSDP2" else 0.42)
        write_left(ax, y, method, weight="bold")
        for rank, y in ((0, top), (1, top + 0.46)):
            write_text(ax, 1.75, y + 0.19, f"rank {rank}", ha="right", **SMALL)
            total = f"{kept[method] / 1e6:.0f} MB"
            write_text(ax, RIGHT, y + 0.19, total, ha="right", weight="bold")
            x = 1.9
            for kind, size in held.items():
                width, share = 6.3 * size / kept["DDP"], 0.5 if kind in cuts else 1.0
                if top < 1 and not rank:
                    write_text(ax, x + width / 2, 0.72, kind, size=11)
                box(ax, (x, y), (width - 0.08, 0.38), line=":", fill=0)
                own = x + (1 - share) * width * rank, y
                label = f"{share * size / 1e6:,.{0 if size >= 1e8 else 1}f} MB"
                box(ax, own, (share * width - 0.08, 0.38), label, KINDS[kind], size=10)
                x += width
    write_left(ax, 3.79, "tensor parallel,\nsharded layers", **SMALL)
    note = f"Computed, with Adam, activations apart. Dotted: on the other rank. {_GATHER}"
    write_left(ax, 4.35, note, color=GREY, **SMALL)
    sizes = ", ".join(f"{method} {size / 1e6:.0f} MB" for method, size in kept.items())
    cut = "ZeRO-1 shards the optimizer state, FSDP2 all three kinds"
    return described(ax.figure, f"{title}: {sizes}. {cut}. {_GATHER}")
