"""The figure of notebook 01, the ladder. The notebook calls it, in its own process; no ranks."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, stacked_bars
from ddp_helpers.draw.style import BLUE, GREEN, INK, ORANGE, SKY, TIMES, WIDTH
from ddp_helpers.launch.machine import chip

# The parts of a step, in their order.
_PARTS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}


def draw_ladder(
    rates: Mapping[str, float],
    marks: Mapping[str, Sequence[float]],
    dataset: str,
    device: torch.device,
) -> Picture:
    """Draw the time of each rung, divided into the parts of a step, with its images per second.

    rates: images per second of each rung, the first being what the others are compared with;
    marks: the times of one pass of it, at its beginning and after each part; dataset and device:
    what it trained on, for the caption.
    """
    seconds = {rung: np.diff(marks[rung]).reshape(-1, len(_PARTS)).sum(axis=0) for rung in rates}
    parts = pd.DataFrame(seconds, index=list(_PARTS)).T
    shares = parts.div(parts.sum(axis=1), axis=0)
    bars = shares.mul(1e6 / pd.Series(rates), axis=0)
    size = WIDTH, 2.2 + 0.55 * len(rates)
    figure, ax, columns = stacked_bars(bars, _PARTS, figsize=size, legend=False)
    plain, longest = next(iter(rates.values())), 1e6 / min(rates.values())
    for column, part in zip(columns, _PARTS, strict=True):
        has_room = bars[part] > 0.075 * longest
        texts = [f"{share:.0%}" if has_room[rung] else "" for rung, share in shares[part].items()]
        ink = "white" if part == "backward" else INK
        ax.bar_label(column, texts, label_type="center", color=ink)
    ends = [f"{rate:,.0f} images/s ({rate / plain:.1f}{TIMES})" for rate in rates.values()]
    ax.bar_label(column, ends, padding=4)
    ax.set(xlim=(0, 1.42 * longest), xlabel="milliseconds for 1,000 training images")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside right center")
    title = f"The plain loader spends {shares['data'].iloc[0]:.0%} of its time on data"
    if (gain := max(rates.values()) / plain) > 1:
        title += f"; the best rung is {gain:.1f} times as fast"
    where = f"{dataset}; {chip(device)}, {torch.get_num_threads()} CPUs"
    note = f"{where}; length: the fastest pass; parts: their shares in one more pass"
    texts = [
        f"{rung} {rate:,.0f} ({', '.join(f'{part} {shares[part][rung]:.0%}' for part in _PARTS)})"
        for rung, rate in rates.items()
    ]
    return captioned(figure, title, note, alt=f"images per second: {'; '.join(texts)}")
