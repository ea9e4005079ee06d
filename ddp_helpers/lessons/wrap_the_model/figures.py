"""Figures of notebook 05: a measured step, buckets and overlap, memory of gradients, DataParallel."""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, link, pieces, write
from ddp_helpers.draw.labels import caption, finding
from ddp_helpers.draw.style import CODE, GREY, INK, LEFT, RIGHT, SMALL, WIDTH, rank_colour

Note = tuple[str, list[int], float]  # what happened, to which layers, and when (in ms)

# ---- a measured step


def at(notes: Sequence[Note], what: str, layers: Sequence[int] = ()) -> float:
    """Return the time of an event in ms; of several, the last one's."""
    return max(ms for name, which, ms in notes if name == what and (not layers or list(which) == list(layers)))


def buckets(notes: Sequence[Note]) -> list[tuple[list[int], float, float]]:
    """For each all-reduce, in the order in which they started: the layers in its bucket, its start and its end."""
    started = [(which, ms) for what, which, ms in notes if what == "all-reduce starts"]
    return [(which, ms, at(notes, "all-reduce ends", which)) for which, ms in started]


def one_step(ranks: Sequence[Sequence[Note]], where: str) -> Picture:
    """Every rank's step as lanes: compute, gradients that become ready, and the all-reduce of each bucket.

    ranks: the notes of each rank. where: the machine they were measured on, for the caption.
    """
    rows = len(buckets(ranks[0]))
    figure, axes = plt.subplots(
        len(ranks), figsize=(WIDTH, 0.9 + len(ranks) * (1.3 + 0.32 * rows)), sharex=True, layout="constrained"
    )
    for rank, (ax, notes) in enumerate(zip(axes, ranks, strict=True)):
        _compute(ax, notes, rank_colour(rank))
        hidden = _all_reduces(ax, notes)
        ax.set_title(f"rank {rank}: {hidden:.0%} of the all-reduce time before its last gradient", loc="left")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1].set(xlabel="time since the start of the step [ms]", xlim=(0, None))
    waits = plt.Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=INK, hatch="////", linewidth=0.5)
    sent = plt.Rectangle((0, 0), 1, 1, color=INK, alpha=0.75)
    names = ["all-reduce of a bucket", "backward waits for it"]
    axes[0].legend([sent, waits], names, loc="lower left", fontsize=10)
    early = sum(start < at(ranks[0], "gradient ready") for _, start, _ in buckets(ranks[0]))
    title = f"{early} of {rows} all-reduces start while backward still computes"
    finding(figure, title)
    caption(figure, f"one step, measured on {len(ranks)} ranks: {where}")
    what = "lanes of compute, of each layer's gradients, from the last to the first, and of each bucket's all-reduce"
    return described(figure, f"{title}, on rank 0 of {len(ranks)}: {what}.")


def _compute(ax: Axes, notes: Sequence[Note], colour: str) -> None:
    """Forward, backward with its wait for what is not averaged yet, and step; below, when each layer is ready."""
    marks = [at(notes, f"{name} starts") for name in ("forward", "backward", "step")] + [at(notes, "step ends")]
    for begin, end, alpha in zip(marks, marks[1:], (0.3, 0.6, 0.9), strict=False):
        ax.barh(0, end - begin, 0.75, begin, color=colour, alpha=alpha, edgecolor="white", linewidth=1.5)
    last = at(notes, "gradient ready")
    ax.barh(0, marks[2] - last, 0.75, last, color="none", edgecolor=INK, hatch="////", linewidth=0)
    ax.text(sum(marks[:2]) / 2, 0, "forward", ha="center", va="center")
    ax.text((marks[1] + last) / 2, 0, "backward", ha="center", va="center")
    ax.text(marks[3], 0, " step", va="center")
    for layer in sorted({which[0] for what, which, _ in notes if what == "gradient ready"}):
        ms = at(notes, "gradient ready", [layer])
        ax.plot([ms, ms], [0.55, 0.8], color=INK, linewidth=1.6)
        ax.text(ms, 1.1, str(layer), ha="center", va="center", fontsize=10)


def _all_reduces(ax: Axes, notes: Sequence[Note]) -> float:
    """A bar for each bucket's all-reduce on a row of its own; gives their share before the last gradient."""
    last, hidden, names = at(notes, "gradient ready"), 0.0, ["compute", "gradient of layer"]
    sent = buckets(notes)
    for row, (layers, start, end) in enumerate(sent):
        ax.barh(2.1 + row, end - start, 0.7, start, color=INK, alpha=0.75)
        hidden += max(0.0, min(end, last) - start)
        names.append(f"bucket {row}: layers {', '.join(map(str, layers[::-1]))}")
    ax.set(ylim=(len(sent) + 1.6, -0.6), yticks=[0, 1, *(2.1 + row for row in range(len(sent)))], yticklabels=names)
    return hidden / sum(end - start for _, start, end in sent)


# ---- a sketch of buckets, whose times are made up

BUCKETS = [(6, 5), (4, 3), (2, 1)]  # layers: backward goes from the last to the first
LAYER, ALL_REDUCE, SCALE = 2, 3, 0.32  # ms a layer, ms an all-reduce, and inches a ms


def ddp_buckets() -> Picture:
    """Draw how DDP overlaps communication: a bucket's all-reduce runs while earlier layers still compute."""
    ax = canvas(5.65, "")
    fast = _timeline(ax, 0.55, "DDP: each bucket as soon as it is full", [4, 8, 12])
    slow = _timeline(ax, 2.75, "Without overlap: all of them after backward", [12, 12, 12])
    title = f"Overlap makes this step {fast} ms long instead of {slow}"
    write(ax, LEFT, 0.25, title, size=14, weight="bold", ha="left")
    ax.plot([1.3, 1.3 + slow * SCALE], [4.95, 4.95], color=INK, linewidth=1.2)
    for ms in range(0, slow, 5):
        ax.plot([1.3 + ms * SCALE] * 2, [4.95, 5.02], color=INK, linewidth=1.2)
        write(ax, 1.3 + ms * SCALE, 5.17, ms, **SMALL)
    write(ax, LEFT, 5.0, "time [ms]", ha="left")
    made_up = f"A sketch: its times are made up, {LAYER} ms a layer and {ALL_REDUCE} ms an all-reduce."
    write(ax, LEFT, 5.4, made_up, ha="left", color=GREY, **SMALL)
    return described(ax.figure, f"{title}: a bucket's all-reduce starts while earlier layers compute. {made_up}")


def _timeline(ax: Axes, top: float, title: str, starts: list[int]) -> int:
    """Draw one schedule, whose all-reduces may start at the given times; give its total time in ms."""

    def bar(begin: int, ms: int, lane: float, text: str, colour: str = GREY, **look: object) -> None:
        corner, size = (1.3 + begin * SCALE, top + lane), (ms * SCALE - 0.04, 0.46)
        box(ax, corner, size, text, colour, **SMALL, **look)

    now = free = 0
    write(ax, LEFT, top + 0.15, title, ha="left", weight="bold")
    for lane, name in ((0.63, "compute"), (1.18, "gradients"), (1.83, "network")):
        write(ax, LEFT, top + lane, name, ha="left")
    for number, (layers, earliest) in enumerate(zip(BUCKETS, starts, strict=True)):
        bar(now, LAYER * len(layers), 0.95, f"bucket {number} fills", fill=0, line="--")
        for layer in layers:
            bar(now, LAYER, 0.4, f"layer {layer}")
            now += LAYER
        begin = max(free, earliest)
        free = begin + ALL_REDUCE
        bar(begin, ALL_REDUCE, 1.6, f"all-reduce\nbucket {number}", INK, fill=0.8, color="white")
        if begin == now:  # it starts the moment the bucket is full
            arrow(ax, (1.28 + now * SCALE, top + 1.42), (1.4 + now * SCALE, top + 1.6))
    bar(now, free - now, 0.4, "waits", fill=0, line=":")
    bar(free, LAYER, 0.4, "step", INK)
    total = free + LAYER
    write(ax, 1.35 + total * SCALE, top + 0.63, f"{total} ms", ha="left", weight="bold")
    return total


# ---- where gradients live, and why not DataParallel


def memory_of_gradients() -> Picture:
    """Draw what gradient_as_bucket_view saves: the second copy of all gradients."""
    title = "Views save one copy of the gradients: 300 MB become 200 MB"
    ax = canvas(2.85, title)
    apart, together = ["gradients", "buckets: a second copy"], ["gradients, in the buckets"]
    for y, view, blocks in ((0.92, False, ["parameters", *apart]), (1.92, True, ["parameters", *together])):
        write(ax, LEFT, y - 0.2, f"gradient_as_bucket_view={view}", ha="left", weight="bold", **CODE)
        for text, (left, width) in zip(blocks, pieces(LEFT, RIGHT, 3), strict=False):
            hatch = "///" if "copy" in text else ""
            box(ax, (left, y), (width, 0.42), f"{text}, 100 MB", rank_colour(0), hatch=hatch, size=11)
    note = "The memory of one rank, without activations and the optimizer's state."
    write(ax, LEFT, 2.65, note, ha="left", color=GREY, **SMALL)
    return described(ax.figure, f"{title}, of which parameters are 100 MB. {note}")


def data_parallel_vs_ddp() -> Picture:
    """Why not DataParallel: all its traffic passes through GPU 0, while DDP has no hub."""
    title = "DataParallel sends all through GPU 0; DDP has no hub"
    ax = canvas(4.65, title)
    write(ax, 2.35, 0.65, "DataParallel: 1 process, 4 threads", weight="bold")
    box(ax, (LEFT, 0.85), (4.5, 2.9), fill=0.06)
    hub = box(ax, (1.7, 1.0), (1.3, 0.5), "GPU 0", rank_colour(0), weight="bold")
    for gpu, (left, width) in enumerate(pieces(0.25, 4.45, 3), start=1):
        other = box(ax, (left + width / 2 - 0.55, 3.05), (1.1, 0.5), f"GPU {gpu}", rank_colour(gpu), size=10)
        link(ax, hub, other, bend=0.12)
        link(ax, other, hub, bend=0.12, line="--")
    hubs = "solid: a piece of the batch, a copy of the model\ndashed: outputs, gradients"
    write(ax, 2.35, 4.2, f"every step, all through GPU 0\n{hubs}", **SMALL)
    write(ax, 7.15, 0.65, "DDP: 4 processes, no hub", weight="bold")
    ring = []
    for gpu in range(4):
        angle = math.pi * (gpu - 1) / 2
        corner = (6.65 + 1.7 * math.cos(angle), 2.02 + 1.17 * math.sin(angle))
        ring.append(box(ax, corner, (1.0, 0.56), f"rank {gpu}\nGPU {gpu}", rank_colour(gpu), size=10))
    for here, following in zip(ring, ring[1:] + ring[:1], strict=True):
        link(ax, here, following, bend=-0.2)
    write(ax, 7.15, 4.2, "every step, round the ring\nall-reduce of the gradients,\nno copies of the model", **SMALL)
    words = "4 threads of a process, and all goes through GPU 0's; 4 processes in a ring, each with a GPU"
    return described(ax.figure, f"{title}: {words}.")
