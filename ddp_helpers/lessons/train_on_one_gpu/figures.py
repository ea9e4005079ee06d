"""The figure of notebook 01, the ladder. The notebook calls it, in its own process; no ranks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREEN, INK, ORANGE, SKY, TIMES, WIDTH
from ddp_helpers.launch.machine import chip

# The parts of a step, in their order.
_PART_COLOURS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}


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
    rungs, speeds = list(rates), list(rates.values())
    ratios = [speed / speeds[0] for speed in speeds]
    shares = {rung: _shares(marks[rung]) for rung in rungs}
    size = WIDTH, 2.2 + 0.55 * len(rungs)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    longest = 1e6 / min(speeds)
    for row, (rung, speed) in enumerate(rates.items()):
        _draw_bar(ax, row, 1e6 / speed, shares[rung], longest)
        text = f"{speed:,.0f} images/s ({ratios[row]:.1f}{TIMES})"
        ax.text(1e6 / speed + 0.01 * longest, row, text, va="center")
    ax.set_yticks(range(len(rungs)), rungs)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.42 * longest), xlabel="milliseconds for 1,000 training images")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside right center")
    fastest = speeds.index(max(speeds))
    title = f"The plain loader spends {shares[rungs[0]]['data']:.0%} of its time on data"
    if fastest:
        title += f"; the best rung is {ratios[fastest]:.1f} times as fast"
    where = f"{dataset}; {chip(device)}, {torch.get_num_threads()} CPUs"
    note = f"{where}; length: the fastest pass; parts: their shares in one more pass"
    texts = [f"{rung} {speed:,.0f} ({_percentages(shares[rung])})" for rung, speed in rates.items()]
    write_title(figure, title)
    write_caption(figure, note)
    return described(figure, f"{title}. Images per second: {'; '.join(texts)}.")


def _draw_bar(
    ax: Axes,
    row: int,
    length: float,
    shares: Mapping[str, float],
    longest: float,
) -> None:
    """Draw a bar of several parts, with the share of each that has room for it."""
    left = 0.0
    for part, share in shares.items():
        width = share * length
        label = part if row == 0 else ""
        ax.barh(row, width, left=left, color=_PART_COLOURS[part], height=0.65, label=label)
        if width > 0.075 * longest:
            ink = "white" if part == "backward" else INK
            ax.text(left + width / 2, row, f"{share:.0%}", color=ink, ha="center", va="center")
        left += width


def _shares(marks: Sequence[float]) -> dict[str, float]:
    """Compute the share of each part of a step in the time between the first and the last mark."""
    total = marks[-1] - marks[0]
    seconds = [end - begin for begin, end in pairwise(marks)]
    number = len(_PART_COLOURS)
    return {part: sum(seconds[place::number]) / total for place, part in enumerate(_PART_COLOURS)}


def _percentages(shares: Mapping[str, float]) -> str:
    """Compose a text of shares, as in data 12%, forward 40%."""
    return ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
