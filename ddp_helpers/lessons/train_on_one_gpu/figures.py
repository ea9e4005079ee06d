"""The figures of notebook 01: the data, where the seconds go, how fast each recipe is, and how accurate."""

import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from torchvision.datasets import MNIST

from ddp_helpers.notebook.drawing import BLUE, GREEN, GREY, INK, ORANGE, SKY, TIMES, Picture, described

PARTS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}


def headed(figure: Figure, title: str, caption: str, told: str) -> Picture:
    """Finish a figure: its finding in bold above it, data and machine in grey below it, and its alt text."""
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    figure.supxlabel(caption, x=0.01, ha="left", size=10, color=GREY)
    return described(figure, f"{title}. {told}")


def samples(data: MNIST, name: str, count: int = 10) -> Picture:
    """The first images of a dataset, each with its label above it."""
    figure, axes = plt.subplots(1, count, figsize=(9.5, 1.9), layout="constrained")
    labels = data.targets[:count].tolist()
    for ax, image, label in zip(axes, data.data, labels, strict=False):
        ax.imshow(image, cmap="gray_r")
        ax.set_title(label)
        ax.axis("off")
    told = f"Their labels are {', '.join(map(str, labels))}."
    return headed(figure, "An image of a digit, and the digit", f"{name}: the first {count} training images", told)


def seconds(spent: Mapping[str, Mapping[str, float]], images: int, where: str) -> Picture:
    """Draw where the time of each recipe goes: a stacked bar in milliseconds per 1,000 images."""
    figure, ax = plt.subplots(figsize=(9.5, 2.2 + 0.6 * len(spent)), layout="constrained")
    longest = max(sum(parts.values()) for parts in spent.values())
    shares = {name: {part: took / sum(parts.values()) for part, took in parts.items()} for name, parts in spent.items()}
    for row, (name, parts) in enumerate(spent.items()):
        left = 0.0
        for part, took in parts.items():
            width = 1e6 * took / images
            ax.barh(row, width, left=left, color=PARTS[part], height=0.6, label="" if row else part)
            if took > 0.06 * longest:
                look = {"color": "white" if part == "backward" else INK, "ha": "center", "va": "center"}
                ax.text(left + width / 2, row, f"{shares[name][part]:.0%}", **look)
            left += width
    ax.set_yticks(range(len(spent)), list(spent))
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("milliseconds for 1,000 training images")
    figure.legend(loc="outside right center")
    first, *others = [f"{parts['data']:.0%} {{}}with the {name}" for name, parts in shares.items()]
    title = ", ".join(["Data take " + first.format("of the time "), *(other.format("") for other in others)])
    told = [f"{name}: {', '.join(f'{part} {share:.0%}' for part, share in of.items())}" for name, of in shares.items()]
    return headed(figure, title, where, f"Shares of the time: {'; '.join(told)}.")


def ladder(
    rates: Mapping[str, float],
    limits: Mapping[str, float],
    where: str,
    halves: Mapping[str, tuple[float, float]] | None = None,
) -> Picture:
    """Images per second of each recipe, its ratio to the first, and its share of the device's arithmetic limit.

    A recipe that is no faster than those above it is grey. halves: the middle half of a recipe's passes, if measured.
    """
    names, speeds = list(rates), list(rates.values())
    gained = [speed > 1.03 * max(speeds[:row], default=speed) for row, speed in enumerate(speeds)]
    figure, ax = plt.subplots(figsize=(9.5, 2 + 0.5 * len(rates)), layout="constrained")
    bars = ax.barh(names, speeds, color=[BLUE if better else "#B8B8B8" for better in gained], height=0.65)
    if halves:
        spread = [[rate - halves[name][0], halves[name][1] - rate] for name, rate in rates.items()]
        bars = ax.barh(names, speeds, xerr=list(zip(*spread, strict=True)), color="none", ecolor=INK)
    ax.bar_label(bars, [f"{speed:,.0f}  ({speed / speeds[0]:.1f}{TIMES})" for speed in speeds], padding=5)
    ax.set_xlim(0, 1.35 * max(speeds))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    for row, (name, rate) in enumerate(rates.items()):
        ax.text(1.02, row, f"{rate / limits[name]:.0%}", transform=ax.get_yaxis_transform(), va="center")
    ax.text(1.02, -0.75, "of the limit", transform=ax.get_yaxis_transform(), va="center", weight="bold")
    ax.invert_yaxis()
    ax.set(xlabel=f"training images per second (ratio to the {names[0]})", ylabel="")
    ax.tick_params(axis="y", length=0)
    best = max(rates, key=rates.get)
    told = "; ".join(f"{name} {rate:,.0f} ({rate / speeds[0]:.1f} times)" for name, rate in rates.items())
    lines = "; a line: the middle half of the passes" if halves else ""
    note = f"{where}; grey: no gain; limit: large matrix products of the same precision{lines}"
    title = f"{best} trains {rates[best] / speeds[0]:.1f} times as fast as the {names[0]}"
    return headed(figure, title, note, f"Images per second: {told}.")


def accuracy(found: pd.DataFrame, where: str) -> Picture:
    """Draw test accuracy against the plain recipe's, in points, with two standard errors; `accuracy.table` has both."""
    figure, ax = plt.subplots(figsize=(9.5, 3.4), layout="constrained")
    marks = {"fast": (BLUE, "o"), "large": (ORANGE, "s")}
    told = []
    for shift, (name, (colour, mark)) in zip((-0.1, 0.1), marks.items(), strict=True):
        points, errors = found["difference", name], 2 * found["error", name]
        look = {"fmt": mark, "color": colour, "capsize": 4, "label": name, "markersize": 7}
        ax.errorbar([row + shift for row in range(len(found))], points, yerr=errors, **look)
        told += [f"{name} after {epochs} epochs {point:+.2f} points" for epochs, point in points.items()]
    ax.axhline(0, color=INK, linewidth=1)
    ax.text(len(found) - 0.32, 0.02, "plain", ha="right", va="bottom")
    ax.set_xticks(range(len(found)), [f"after {epochs} epoch{'s' * (epochs > 1)}" for epochs in found.index])
    ax.set(xlim=(-0.5, len(found) - 0.3), ylabel="points above or below plain")
    figure.legend(loc="outside right center")
    last = math.ceil(100 * found["difference"].iloc[-1].abs().max()) / 100
    title = f"After {found.index[-1]} epochs both are within {last:.2f} points of the plain recipe"
    return headed(figure, title, f"{where}; a line: two standard errors each way", "; ".join(told) + ".")
