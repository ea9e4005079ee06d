"""Figures of notebook 01: samples, seconds by part of a step, the ladder, accuracy by epoch; and their table."""

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from torchvision.datasets import MNIST

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import caption, finding
from ddp_helpers.draw.style import BLUE, GREEN, INK, ORANGE, SKY, TIMES
from ddp_helpers.records import runs

# ---- the figures

PARTS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}


def finished(figure: Figure, title: str, where: str, alt: str) -> Picture:
    """Give a figure its finding above it, data and machine below it, and its alt text."""
    finding(figure, title)
    caption(figure, where)
    return described(figure, f"{title}. {alt}")


def draw_samples(data: MNIST, name: str, count: int = 10) -> Picture:
    """The first images of a dataset, each with its label above it."""
    figure, axes = plt.subplots(1, count, figsize=(9.5, 1.9), layout="constrained")
    labels = data.targets[:count].tolist()
    for ax, image, label in zip(axes, data.data, labels, strict=False):
        ax.imshow(image, cmap="gray_r")
        ax.set_title(label)
        ax.axis("off")
    where = f"{name}: the first {count} training images"
    return finished(figure, "An image of a digit, and the digit", where, f"Labels: {', '.join(map(str, labels))}.")


def draw_seconds(spent: Mapping[str, Mapping[str, float]], images: int, where: str) -> Picture:
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
    data = ", ".join(f"{parts['data']:.0%} with the {name}" for name, parts in shares.items())
    told = [f"{name}: {', '.join(f'{part} {share:.0%}' for part, share in of.items())}" for name, of in shares.items()]
    return finished(figure, f"Of the time, data take {data}", where, f"Shares of the time: {'; '.join(told)}.")


def draw_ladder(rates: Mapping[str, float], limits: Mapping[str, float], where: str) -> Picture:
    """Images per second of each recipe, its ratio to the first, and its share of the device's arithmetic limit.

    A recipe that is no faster than those above it is grey.
    """
    names, speeds = list(rates), list(rates.values())
    gained = [speed > 1.03 * max(speeds[:row], default=speed) for row, speed in enumerate(speeds)]
    figure, ax = plt.subplots(figsize=(9.5, 2 + 0.5 * len(rates)), layout="constrained")
    bars = ax.barh(names, speeds, color=[BLUE if better else "#B8B8B8" for better in gained], height=0.65)
    ax.bar_label(bars, [f"{speed:,.0f}  ({speed / speeds[0]:.1f}{TIMES})" for speed in speeds], padding=5)
    for row, (name, rate) in enumerate(rates.items()):
        ax.text(1.02, row, f"{rate / limits[name]:.0%}", transform=ax.get_yaxis_transform(), va="center")
    ax.text(1.02, -0.75, "of the limit", transform=ax.get_yaxis_transform(), va="center", weight="bold")
    ax.set(xlim=(0, 1.35 * max(speeds)), xlabel=f"training images per second (ratio to the {names[0]})")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    best = max(rates, key=rates.get)
    told = "; ".join(f"{name} {rate:,.0f} ({rate / speeds[0]:.1f} times)" for name, rate in rates.items())
    note = f"{where}; grey: no gain; limit: large matrix products of the same precision"
    title = f"{best} trains {rates[best] / speeds[0]:.1f} times as fast as the {names[0]}"
    return finished(figure, title, note, f"Images per second: {told}.")


def draw_accuracy(found: pd.DataFrame, where: str) -> Picture:
    """Draw test accuracy against the plain recipe's, in points, with two standard errors; `table` has both."""
    figure, ax = plt.subplots(figsize=(9.5, 3.4), layout="constrained")
    told = []
    for shift, name, colour, mark in ((-0.1, "fast", BLUE, "o"), (0.1, "large", ORANGE, "s")):
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
    return finished(figure, title, f"{where}; a line: two standard errors each way", "; ".join(told) + ".")


# ---- what each recipe is worth in accuracy: recorded in notebooks/results/recipes

AFTER = (1, 3, 14)  # epochs


def table(folder: Path) -> pd.DataFrame:
    """Test accuracy in per cent after 1, 3 and 14 epochs, as far as the runs are: mean and spread over the seeds.

    "difference" is a recipe's mean minus the plain one's, "error" its standard error: what chance alone explains.
    """
    epochs = runs.table(folder)
    epochs = epochs[epochs["epoch"].isin(AFTER)]
    score, recipe = 100 * epochs["test_accuracy"], epochs["run"].str.partition("-")[0].rename("recipe")
    found = score.groupby([epochs["epoch"].astype(int), recipe]).agg(["mean", "std", "count"]).unstack()
    mean, variance = found["mean"], found["std"] ** 2 / found["count"]
    others = mean.columns.drop("plain")
    for name in others:
        found["difference", name] = mean[name] - mean["plain"]
    for name in others:
        found["error", name] = (variance[name] + variance["plain"]) ** 0.5
    return found
