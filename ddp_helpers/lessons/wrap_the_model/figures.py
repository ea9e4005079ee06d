"""The figures of notebook 05: a measured step, and a sketch of buckets that fill and leave.

The notebook calls them, in its own process: the first with what its ranks noted, the others draw
from their arguments alone.
"""

from collections.abc import Sequence
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import (
    Picture,
    box,
    canvas,
    described,
    equal_parts,
    write_left,
    write_text,
)
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import GREY, INK, RIGHT, SMALL, WIDTH, Look, rank_colour

Note = tuple[str, list[int], float]  # an event, the layers that it was about, and when, in ms

# ---- a measured step


def one_step(ranks: Sequence[Sequence[Note]], where: str) -> Picture:
    """Draw every rank's step: compute, gradients that become ready, the all-reduce of each bucket.

    ranks: the notes of each rank. where: the machine they were measured on, for the caption.
    """
    size = WIDTH, 0.9 + 2.26 * len(ranks)
    figure, axes = plt.subplots(len(ranks), figsize=size, sharex=True, layout="constrained")
    findings = []
    for rank, (ax, notes) in enumerate(zip(axes, ranks, strict=True)):
        when = {event: ms for event, _, ms in notes}  # the last time of each
        _draw_compute(ax, when, rank_colour(rank))
        for event, layers, ms in notes:
            if event == "gradient ready":
                ax.plot([ms, ms], [0.55, 0.8], color=INK, linewidth=1.6)
                ax.text(ms, 1.1, str(layers[0]), ha="center", va="center", fontsize=10)
        buckets = _draw_all_reduces(ax, notes)
        hidden = sum(max(0, min(end, when["gradient ready"]) - start) for start, end in buckets)
        share = hidden / sum(end - start for start, end in buckets)
        findings.append(
            f"rank {rank}: {share:.0%} of the all-reduce time passes while backward computes"
        )
        ax.set_title(findings[-1], loc="left")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1].set(xlabel="time since the start of the step [ms]", xlim=(0, None))
    axes[0].legend(loc="lower left", fontsize=10)
    title = "Buckets leave while backward still computes; for the last one it waits"
    where = f"one step, measured on {len(ranks)} ranks: {where}"
    return captioned(figure, title, where, alt="; ".join(findings))


def _draw_compute(ax: Axes, when: dict[str, float], colour: str) -> None:
    """Draw forward, backward with its wait for all-reduces, and step. when: ms of each event."""
    events = ("forward starts", "backward starts", "step starts", "step ends")
    ends = [when[event] for event in events]
    for (start, end), alpha in zip(pairwise(ends), (0.3, 0.6, 0.9), strict=True):
        ax.barh(0, end - start, 0.75, start, color=colour, alpha=alpha, edgecolor="white")
    forward, backward, step, step_end = ends
    last = when["gradient ready"]
    look: Look = {"color": "none", "edgecolor": INK, "hatch": "////", "linewidth": 0}
    ax.barh(0, step - last, 0.75, last, label="backward waits for it", **look)
    ax.text((forward + backward) / 2, 0, "forward", ha="center", va="center")
    ax.text((backward + last) / 2, 0, "backward", ha="center", va="center")
    ax.text(step_end, 0, " step", va="center")


def _draw_all_reduces(ax: Axes, notes: Sequence[Note]) -> list[tuple[float, float]]:
    """Draw each bucket's all-reduce on a row of its own; return start and end of each, in ms."""
    ends = {tuple(layers): ms for event, layers, ms in notes if event == "all-reduce ends"}
    names, bars = ["compute", "gradient of layer"], list[tuple[float, float]]()
    for event, layers, start in notes:
        if event == "all-reduce starts":
            names.append(f"bucket {len(bars)}: layers {', '.join(map(str, layers[::-1]))}")
            bars.append((start, ends[tuple(layers)]))
    rows = [2.1 + number for number in range(len(bars))]
    widths, starts = [end - start for start, end in bars], [start for start, _ in bars]
    ax.barh(rows, widths, 0.7, starts, color=INK, alpha=0.75, label="all-reduce of a bucket")
    ax.set(ylim=(len(rows) + 1.6, -0.6), yticks=[0, 1, *rows], yticklabels=names)
    return bars


# ---- a sketch of buckets, moment by moment, whose times are made up: 2 ms a layer, 3 an all-reduce

_MOMENTS = {  # by ms: when a gradient is ready, and when all is done
    0: "backward begins with layer 6, the last one",
    2: "gradient 6 is ready, and waits in bucket 0",
    4: "gradient 5 is ready, so bucket 0 is full and leaves",
    6: "gradient 4 is ready, while bucket 0 is under way",
    8: "gradient 3 is ready, so bucket 1 is full and leaves",
    10: "gradient 2 is ready, while bucket 1 is under way",
    12: "gradient 1 is ready, so bucket 2 is full and leaves, and backward only waits",
    15: "every gradient is the mean over the ranks, and step() begins",
}
BUCKET_MOMENTS = tuple(_MOMENTS)
_NOTE = "A sketch with made-up times: 2 ms a layer, 3 ms an all-reduce. Without overlap step() "
_NOTE += "would begin at 12 + 9 = 21 ms."


def bucket_step(ms: int) -> Picture:
    """Draw which gradients are ready, and which buckets have left, at one moment of the sketch.

    ms: one of BUCKET_MOMENTS.
    """
    title = f"{ms} ms: {_MOMENTS[ms]}"
    ax = canvas(3.75, title)
    for text, y in {"backward": 0.83, "gradients": 1.98, "network": 3.08}.items():
        write_left(ax, y, text)
    columns = equal_parts(1.3, RIGHT, 6)
    ready = min(ms // 2, 6)  # gradients: backward goes from layer 6 to layer 1
    for place, (left, width) in enumerate(columns):
        look: Look = {"fill": 0.25 * (place < ready), "line": "-" if place < ready else ":"}
        if place == ready:
            look = {"fill": 1, "weight": "bold", "color": "white"}
        box(ax, (left, 0.6), (width, 0.46), f"layer {6 - place}", **look)
    for bucket, (left, _) in enumerate(columns[::2]):
        box(ax, (left - 0.04, 1.4), (2.7, 1.15), fill=0.04, line="--")
        state, message = "empty", None
        if ready == 2 * bucket + 1:
            state = f"waits for gradient {5 - 2 * bucket}"
        if ms >= 4 * bucket + 7:
            state, message = "back", ("averaged on all ranks", 0.15, INK)
        elif ready > 2 * bucket + 1:
            state, message = "full, has left", ("all-reduce under way", 0.8, "white")
        write_text(ax, left + 1.31, 1.62, f"bucket {bucket}: {state}", **SMALL)
        if message:
            text, fill, colour = message
            box(ax, (left, 2.85), (2.62, 0.46), text, INK, fill=fill, color=colour, **SMALL)
    for place, (left, width) in enumerate(columns[:ready]):
        text = f"gradient {6 - place}"
        box(ax, (left + 0.06, 1.9), (width - 0.12, 0.5), text, rank_colour(0), **SMALL)
    write_left(ax, 3.58, _NOTE, color=GREY, **SMALL)
    return described(ax.figure, f"{title}. {_NOTE}")
