"""The figure of notebook 01. The notebook calls it; no ranks."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, stacked_bars
from ddp_helpers.draw.style import BLUE, GREEN, INK, ORANGE, SKY, WIDTH
from ddp_helpers.launch.machine import chip

# The parts of a step, in their order.
_PARTS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}


def draw_parts(rate: float, marks: Sequence[float], dataset: str, device: torch.device) -> Picture:
    """Draw the time of the plain loop, divided into the parts of a step.

    rate: images per second; marks: the times of one pass, at its start and after each part;
    dataset and device: what it trained on, for the caption.
    """
    seconds = np.diff(marks).reshape(-1, len(_PARTS)).sum(axis=0)
    shares = dict(zip(_PARTS, seconds / seconds.sum(), strict=True))
    whole = 1e6 / rate  # ms for 1,000 images
    bar = pd.DataFrame(shares, index=["plain loader"]) * whole
    figure, ax, columns = stacked_bars(bar, _PARTS, figsize=(WIDTH, 2.75), legend=False)
    for column, (part, share) in zip(columns, shares.items(), strict=True):
        text = f"{share:.0%}" if share > 0.075 else ""
        ink = "white" if part == "backward" else INK
        ax.bar_label(column, [text], label_type="center", color=ink)
    ax.bar_label(column, [f"{rate:,.0f} images/s"], padding=4)
    ax.set(xlim=(0, 1.3 * whole), xlabel="milliseconds for 1,000 training images")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside right center")
    title = f"The plain loader spends {shares['data']:.0%} of its time on data"
    where = f"{dataset}; {chip(device)}, {torch.get_num_threads()} CPUs"
    note = f"{where}; length: the fastest pass; parts: their shares in one more pass"
    texts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    return captioned(figure, title, note, alt=f"{rate:,.0f} images per second: {texts}")
