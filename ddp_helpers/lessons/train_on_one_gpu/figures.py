"""The figures of the first notebook: what the data look like, how fast each recipe is, where its seconds go."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from torchvision.datasets import MNIST

from ddp_helpers.notebook.drawing import BLUE, GREEN, GREY, INK, ORANGE, SKY, TIMES, Picture, described

PARTS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}
DARK = (BLUE, GREEN)  # white text is readable on these


def samples(data: MNIST, name: str, count: int = 10) -> Picture:
    """The first images of a dataset, each with its label above it."""
    figure, axes = plt.subplots(1, count, figsize=(9.5, 1.7), layout="constrained")
    labels = data.targets[:count].tolist()
    for ax, image, label in zip(axes, data.data, labels, strict=False):
        ax.imshow(image, cmap="gray_r")
        ax.set_title(label)
        ax.axis("off")
    figure.suptitle(f"{name}: the first {count} training images, and their labels", fontsize=12)
    return described(figure, f"The first {count} images of {name}; their labels are {', '.join(map(str, labels))}.")


def ladder(
    rates: Mapping[str, float],
    limits: Mapping[str, float],
    where: str,
    halves: Mapping[str, tuple[float, float]] | None = None,
) -> Picture:
    """Images per second of each recipe, its ratio to the first, and its share of the device's arithmetic limit.

    halves: between which two speeds the middle half of the passes of a recipe lies, where that was measured.
    """
    names, plain = list(rates), next(iter(rates.values()))
    figure, ax = plt.subplots(figsize=(9.5, 1.6 + 0.5 * len(rates)), layout="constrained")
    colours = [GREY] + [BLUE] * (len(rates) - 1)
    bars = ax.barh(names, list(rates.values()), color=colours, height=0.65)
    if halves:
        spread = [[rate - halves[name][0], halves[name][1] - rate] for name, rate in rates.items()]
        bars = ax.barh(names, list(rates.values()), xerr=list(zip(*spread, strict=True)), color="none", ecolor=INK)
    ax.bar_label(bars, [f"{rate:,.0f}  ({rate / plain:.1f}{TIMES})" for rate in rates.values()], padding=5)
    ax.set_xlim(0, 1.35 * max(rates.values()))
    for row, (name, rate) in enumerate(rates.items()):
        ax.text(1.02, row, f"{rate / limits[name]:.0%}", transform=ax.get_yaxis_transform(), va="center")
    ax.text(1.02, -0.75, "of the limit", transform=ax.get_yaxis_transform(), va="center", weight="bold")
    ax.invert_yaxis()
    lines = "; a line is the middle half of the passes" if halves else ""
    ax.set(xlabel=f"training speed in images per second (ratio to the plain loader){lines}", ylabel="")
    ax.tick_params(axis="y", length=0)
    figure.suptitle(f"One device, rung by rung: {where}", fontsize=12)
    told = "; ".join(f"{name} {rate:,.0f} ({rate / plain:.1f} times)" for name, rate in rates.items())
    return described(figure, f"Images per second on one device, and the ratio to the plain loader: {told}.")


def seconds(spent: Mapping[str, Mapping[str, float]], images: int, where: str) -> Picture:
    """Draw where the time of each recipe goes: a stacked bar in milliseconds per 1,000 images."""
    figure, ax = plt.subplots(figsize=(9.5, 1.8 + 0.6 * len(spent)), layout="constrained")
    longest = max(sum(parts.values()) for parts in spent.values())
    for row, parts in enumerate(spent.values()):
        left = 0.0
        for part, took in parts.items():
            width = 1e6 * took / images
            ax.barh(row, width, left=left, color=PARTS[part], height=0.6, label="" if row else part)
            if took > 0.06 * longest:
                look = {"color": "white" if PARTS[part] in DARK else INK, "ha": "center", "va": "center"}
                ax.text(left + width / 2, row, f"{took / sum(parts.values()):.0%}", **look)
            left += width
    ax.set_yticks(range(len(spent)), list(spent))
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds for 1,000 training images")
    figure.legend(loc="outside upper right", ncols=len(PARTS))
    figure.suptitle(f"Where the time goes: {where}", fontsize=12, x=0.02, ha="left")
    told = "; ".join(
        f"{name}: " + ", ".join(f"{part} {took / sum(parts.values()):.0%}" for part, took in parts.items())
        for name, parts in spent.items()
    )
    return described(figure, f"Where the time of training goes. {told}.")
