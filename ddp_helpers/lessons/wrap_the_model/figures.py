"""Draw buckets that fill and leave, moment by moment; notebook 05 calls it, in the driver process.

The times are made up: 2 ms per layer, 3 ms per all-reduce.
"""

from ddp_helpers.draw.drawing import (
    Picture,
    box,
    canvas,
    described,
    equal_parts,
    write_left,
    write_text,
)
from ddp_helpers.draw.style import GREY, INK, RIGHT, SMALL, Look, rank_colour

_MOMENTS = {  # by ms: when a gradient is ready, and when all is done
    0: "backward starts with layer 6, the last one",
    2: "gradient 6 is ready, and waits in bucket 0",
    4: "gradient 5 is ready, so bucket 0 is full and leaves",
    6: "gradient 4 is ready, while bucket 0 is under way",
    8: "gradient 3 is ready, so bucket 1 is full and leaves",
    10: "gradient 2 is ready, while bucket 1 is under way",
    12: "gradient 1 is ready, so bucket 2 is full and leaves, and backward only waits",
    15: "every gradient is the mean over the ranks, and step() starts",
}
BUCKET_MOMENTS = tuple(_MOMENTS)
_NOTE = "A sketch with made-up times: 2 ms per layer, 3 ms per all-reduce. Without overlap step() "
_NOTE += "would start at 12 + 9 = 21 ms."


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
