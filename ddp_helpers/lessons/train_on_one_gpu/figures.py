"""The figures of notebook 01: samples, seconds by part of a step, the ladder, accuracy by epoch.

The notebook calls them, in its own process; no ranks. `table` reads the recorded runs for the last.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torchvision.datasets import MNIST

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREEN, INK, ORANGE, SKY, TIMES, WIDTH
from ddp_helpers.records import runs

# ---- the figures

_PART_COLOURS = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN}
_NO_GAIN = "#B8B8B8"


def _finished(figure: Figure, title: str, where: str, alt: str) -> Picture:
    """Give a figure its finding above it, data and machine below it, and its alt text."""
    write_title(figure, title)
    write_caption(figure, where)
    return described(figure, f"{title}. {alt}")


def draw_samples(data: MNIST, name: str, count: int = 10) -> Picture:
    """Draw the first images of a dataset, each with its label above it."""
    figure, axes = plt.subplots(1, count, figsize=(WIDTH, 1.9), layout="constrained")
    labels = data.targets[:count].tolist()
    for ax, image, label in zip(axes, data.data, labels, strict=False):
        ax.imshow(image, cmap="gray_r")
        ax.set_title(label)
        ax.axis("off")
    where = f"{name}: the first {count} training images"
    alt = f"Labels: {', '.join(map(str, labels))}."
    return _finished(figure, "An image of a digit, and the digit", where, alt)


def draw_seconds(spent: Mapping[str, Mapping[str, float]], images: int, where: str) -> Picture:
    """Draw where the time of each recipe goes: a stacked bar in milliseconds per 1,000 images.

    spent: by recipe, the seconds of each part of a step; images: trained in these seconds;
    where: data and machine, for the caption.
    """
    size = WIDTH, 2.2 + 0.6 * len(spent)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    shares = {recipe: _shares(seconds) for recipe, seconds in spent.items()}
    longest = max(sum(seconds.values()) for seconds in spent.values())
    for row, (recipe, seconds) in enumerate(spent.items()):
        left = 0.0
        for part, share in shares[recipe].items():
            width = 1e6 * seconds[part] / images
            label = part if row == 0 else ""
            ax.barh(row, width, left=left, color=_PART_COLOURS[part], height=0.6, label=label)
            if seconds[part] > 0.06 * longest:
                ink = "white" if part == "backward" else INK
                middle = left + width / 2
                ax.text(middle, row, f"{share:.0%}", color=ink, ha="center", va="center")
            left += width
    ax.set_yticks(range(len(spent)), list(spent))
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("milliseconds for 1,000 training images")
    figure.legend(loc="outside right center")
    data = ", ".join(f"{parts['data']:.0%} with the {recipe}" for recipe, parts in shares.items())
    texts = [f"{recipe}: {_percentages(parts)}" for recipe, parts in shares.items()]
    alt = f"Shares of the time: {'; '.join(texts)}."
    return _finished(figure, f"Of the time, data take {data}", where, alt)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Divide the seconds of each part by those of all."""
    total = sum(seconds.values())
    return {part: part_seconds / total for part, part_seconds in seconds.items()}


def _percentages(shares: Mapping[str, float]) -> str:
    """Compose a text of shares, as in data 12%, forward 40%."""
    return ", ".join(f"{part} {share:.0%}" for part, share in shares.items())


def draw_ladder(rates: Mapping[str, float], limits: Mapping[str, float], where: str) -> Picture:
    """Draw images per second of each recipe, its ratio to the first, and its share of the limit.

    A recipe that is no faster than those above it is grey. limits: the images per second that the
    device's arithmetic allows; where: data and machine, for the caption.
    """
    recipes, speeds = list(rates), list(rates.values())
    ratios = [speed / speeds[0] for speed in speeds]
    gains = [speed > 1.03 * max(speeds[:row], default=speed) for row, speed in enumerate(speeds)]
    size = WIDTH, 2 + 0.5 * len(rates)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    colours = [BLUE if gain else _NO_GAIN for gain in gains]
    bars = ax.barh(recipes, speeds, color=colours, height=0.65)
    pairs = zip(speeds, ratios, strict=True)
    labels = [f"{speed:,.0f}  ({ratio:.1f}{TIMES})" for speed, ratio in pairs]
    ax.bar_label(bars, labels, padding=5)
    at_the_right = ax.get_yaxis_transform()
    for row, (recipe, rate) in enumerate(rates.items()):
        share = rate / limits[recipe]
        ax.text(1.02, row, f"{share:.0%}", transform=at_the_right, va="center")
    ax.text(1.02, -0.75, "of the limit", transform=at_the_right, va="center", weight="bold")
    ax.set(xlim=(0, 1.35 * max(speeds)))
    ax.set(xlabel=f"training images per second (ratio to the {recipes[0]})")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    fastest = speeds.index(max(speeds))
    title = f"{recipes[fastest]} trains {ratios[fastest]:.1f} times as fast as the {recipes[0]}"
    note = f"{where}; grey: no gain; limit: large matrix products of the same precision"
    texts = [
        f"{recipe} {speed:,.0f} ({ratio:.1f} times)"
        for recipe, speed, ratio in zip(recipes, speeds, ratios, strict=True)
    ]
    return _finished(figure, title, note, f"Images per second: {'; '.join(texts)}.")


def draw_accuracy(accuracies: pd.DataFrame, where: str) -> Picture:
    """Draw test accuracy against the plain recipe's, in points, with two standard errors.

    accuracies: from `table`; where: data and machine, for the caption.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 3.4), layout="constrained")
    texts = _draw_differences(ax, accuracies, "fast", BLUE, marker="o", shift=-0.1)
    texts += _draw_differences(ax, accuracies, "large", ORANGE, marker="s", shift=0.1)
    ax.axhline(0, color=INK, linewidth=1)
    ax.text(len(accuracies) - 0.32, 0.02, "plain", ha="right", va="bottom")
    ticks = [f"after {epochs} epoch{'s' * (epochs > 1)}" for epochs in accuracies.index]
    ax.set_xticks(range(len(accuracies)), ticks)
    ax.set(xlim=(-0.5, len(accuracies) - 0.3), ylabel="points above or below plain")
    figure.legend(loc="outside right center")
    last = accuracies["difference"].iloc[-1].abs().max()
    bound = math.ceil(100 * last) / 100
    epochs = accuracies.index[-1]
    title = f"After {epochs} epochs both are within {bound:.2f} points of the plain recipe"
    note = f"{where}; a line: two standard errors each way"
    return _finished(figure, title, note, f"{'; '.join(texts)}.")


def _draw_differences(
    ax: Axes,
    accuracies: pd.DataFrame,
    recipe: str,
    colour: str,
    marker: str,
    shift: float,
) -> list[str]:
    """Draw a recipe's differences from the plain one; return them as texts.

    shift: how far right of its epoch a mark stands, so that those of two recipes stand apart.
    """
    differences = accuracies["difference", recipe]
    ax.errorbar(
        [row + shift for row in range(len(accuracies))],
        differences,
        yerr=2 * accuracies["error", recipe],
        fmt=marker,
        color=colour,
        capsize=4,
        label=recipe,
        markersize=7,
    )
    by_epochs = differences.items()
    return [f"{recipe} after {epochs} epochs {points:+.2f} points" for epochs, points in by_epochs]


# ---- what each recipe is worth in accuracy: recorded in notebooks/results/recipes

_AFTER_EPOCHS = (1, 3, 14)


def accuracy_by_recipe(folder: Path) -> pd.DataFrame:
    """Tabulate test accuracy in per cent after 1, 3 and 14 epochs, as far as a folder has runs.

    A row for each number of epochs. Columns by recipe: "mean", "std" and "count" over the seeds;
    "difference", the mean minus the plain recipe's; "error", the standard error of the difference.
    """
    epochs = runs.table(folder)
    epochs = epochs[epochs["epoch"].isin(_AFTER_EPOCHS)]
    percent = 100 * epochs["test_accuracy"]
    recipe = epochs["run"].str.partition("-")[0].rename("recipe")
    groups = percent.groupby([epochs["epoch"].astype(int), recipe])
    accuracies = groups.agg(["mean", "std", "count"]).unstack()
    mean = accuracies["mean"]
    variance = accuracies["std"] ** 2 / accuracies["count"]
    others = mean.columns.drop("plain")
    for name in others:
        accuracies["difference", name] = mean[name] - mean["plain"]
    for name in others:
        accuracies["error", name] = (variance[name] + variance["plain"]) ** 0.5
    return accuracies
