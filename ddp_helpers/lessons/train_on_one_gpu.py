"""Lesson 01, train on one GPU: its exercises, its figures, and what each recipe is worth in accuracy."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchvision.datasets import MNIST

from ddp_helpers.draw.drawing import Picture, described
from ddp_helpers.draw.labels import caption, finding
from ddp_helpers.draw.style import BLUE, GREEN, INK, ORANGE, SKY, TIMES
from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.records import runs

Batches = list[tuple[Tensor, Tensor]]

# ---- the exercises: a bound, a training loop to mend, and a test


def best_speed_up(p: float) -> float:
    """Old time divided by new time, if a share p of the old time costs nothing any more."""
    return 1 / (1 - p)


def train_pass(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    clear: bool = True,
    mode: bool = True,
    weigh: bool = True,
) -> float:
    """Train for one pass; returns the mean loss of an image. Each switch that is off is one of the faults to mend."""
    model.train(mode or model.training)
    total, count = 0.0, 0
    for images, labels in batches:
        if clear:
            optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        n = len(labels) if weigh else 1
        total, count = total + loss.item() * n, count + n
    return total / count


def accuracy(model: nn.Module, batches: Batches, mode: bool = True, weigh: bool = True) -> float:
    """Share of the images whose highest score is at their label. Each switch that is off is a plausible mistake."""
    model.train(model.training and not mode)
    total, count = 0.0, 0
    for images, labels in batches:
        n = len(labels) if weigh else 1
        right = (model(images).argmax(dim=1) == labels).double().mean().item()
        total, count = total + right * n, count + n
    return total / count


class Doubling(nn.Module):
    """Stands for dropout, without chance: in training it doubles the scores and turns their order round."""

    def forward(self, x: Tensor) -> Tensor:
        """The scores, as they are in evaluation."""
        return 2 * x.flip(1) if self.training else x


def called(name: str, kind: type) -> type:
    """A subclass that a verdict shows by a short name."""
    return type(name, (kind,), {"__repr__": lambda self: name})


Model, Descent, Some = called("model", nn.Sequential), called("optimizer", SGD), called("batches", list)


def case(seed: int, training: bool, optimized: bool) -> tuple:
    """The arguments of one call: a model in one of its two modes, an optimizer if it is needed, batches of 8, 8, 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(nn.Linear(3, 4), Doubling(), nn.LogSoftmax(dim=1)).train(training)
        batches = Some((torch.randn(size, 3), torch.randint(4, (size,))) for size in (8, 8, 2))
    return (model, Descent(model.parameters(), lr=0.5), batches) if optimized else (model, batches)


def without(oracle: Callable, *switches: str) -> Callable:
    """The answer with some of its switches off: a plausible mistake."""
    return partial(oracle, **dict.fromkeys(switches, False))


WEIGH = "The last batch is smaller: count each batch by its number of images."
FAULTS = {"mode": "before the loop", "clear": "in it", "weigh": "in what is returned"}
TWO_LEFT = {
    f"Two faults are left: one {FAULTS[one]}, one {FAULTS[other]}.": without(train_pass, one, other)
    for one, other in combinations(FAULTS, 2)
}
EXERCISES = [
    Exercise(
        best_speed_up,
        [(0.5,), (0.2,), (0.0,)],
        {
            "What is left of the old time is 1 - p; divide the old time, 1, by it.": lambda p: 1 / p if p else 1.0,
            "That is the time that is left; the speed-up is the old time divided by it.": lambda p: 1 - p,
        },
    ),
    Exercise(
        train_pass,
        [case(seed, training, optimized=True) for seed in (1, 2) for training in (False, True)],
        {
            "Gradients add up from batch to batch: clear them.": without(train_pass, "clear"),
            "The pass before this one was a test: in which mode is the model?": without(train_pass, "mode"),
            WEIGH: without(train_pass, "weigh"),
            **TWO_LEFT,
            "None of the three faults is mended yet.": without(train_pass, *FAULTS),
        },
    ),
    Exercise(
        accuracy,
        [case(seed, training, optimized=False) for seed in (3, 4) for training in (True, False)],
        {
            "Dropout must be off in a test: call model.eval().": without(accuracy, "mode"),
            WEIGH: without(accuracy, "weigh"),
            "Two things are missing: the mode, and the sizes of the batches.": without(accuracy, "mode", "weigh"),
        },
    ),
]


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
