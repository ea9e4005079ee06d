"""Figures of 11b: attempts on a time line, the chance to survive, the cost of checkpoints.

The notebook draws them; they need no ranks.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, INK, ORANGE, RED, WIDTH, rank_colour
from ddp_helpers.lessons.survive_preemption.attempts import Attempt, list_attempts

_BAR = 0.5  # the height of an attempt in its lane, which is 1 high


def attempts_timeline(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """Draw a lane for each run, its attempts one after the other.

    runs: by the run's name, what `read_events` gives.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 1.6 + 0.75 * len(runs)), layout="constrained")
    labels = []
    findings = []
    for lane, (name, table) in enumerate(runs.items()):
        attempts = list_attempts(table)
        seconds_lost = sum(attempt.lost_seconds for attempt in attempts)
        lost = f"{seconds_lost:.1f} s lost" if seconds_lost else "nothing lost"
        labels.append(f"{name}\n{lost}")
        if len(attempts) > 1:
            findings.append(f"{name}: {lost}")
        saves = table[table["event"] == "saved"]
        for attempt in attempts:
            seconds = saves.loc[saves["attempt"] == attempt.attempt, "seconds"]
            _draw_attempt(ax, lane, attempt, seconds.tolist())
        for before, after in pairwise(attempts):
            _draw_pause(ax, lane, before.end, after.begin)
    ax.set_yticks(range(len(runs)), labels)
    ax.set(ylim=(len(runs) - 0.5, -0.6), xlim=(0, None))
    ax.set(xlabel="seconds since the run first started")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    title = "; ".join(findings)
    title = title[:1].upper() + title[1:]
    legend = "numbers are attempts, ticks checkpoints"
    return captioned(figure, title, f"{legend}; hatched is work that was lost, and done again")


def _draw_attempt(ax: Axes, lane: int, attempt: Attempt, saves: list[float]) -> None:
    """Draw an attempt in its lane: a bar with a tick for each save, whose seconds are given."""
    colour = rank_colour(attempt.attempt - 1)
    ax.barh(lane, attempt.end - attempt.begin, _BAR, attempt.begin, color=colour, alpha=0.3)
    bottom, top = lane - _BAR / 2, lane + _BAR / 2
    ax.vlines(saves, bottom, top, color=colour, linewidth=1.8, zorder=4)
    if attempt.lost_seconds:
        lost_from = attempt.end - attempt.lost_seconds
        (lost,) = ax.barh(lane, attempt.lost_seconds, _BAR, lost_from, zorder=3)
        lost.set(facecolor="white", edgecolor=RED, hatch="////")
    middle = (attempt.begin + attempt.end) / 2
    ax.text(middle, lane - 0.32, str(attempt.attempt), ha="center", va="bottom", color=INK)


def _draw_pause(ax: Axes, lane: int, begin: float, end: float) -> None:
    """Draw the time from the end of an attempt to the begin of the next, in seconds."""
    arrow = {"arrowstyle": "->", "color": GREY}
    ax.annotate("", (end, lane), (begin, lane), arrowprops=arrow)
    middle = (begin + end) / 2
    ax.text(middle, lane - 0.2, f"{end - begin:.1f} s", ha="center", color=GREY)


def survival(gpu_hours: float, days: int = 7) -> Picture:
    """Draw the share of jobs that meet no failure, over the number of their GPUs.

    gpu_hours: hours from one failure of a GPU to its next; days: how long a job runs.
    """

    def share(gpus: float) -> float:
        return math.exp(-days * 24 * gpus / gpu_hours)

    figure, ax = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    counts = np.geomspace(1, 16_384, 200)
    ax.plot(counts, [share(count) for count in counts], color=BLUE, linewidth=2)
    for count in (8, 64, 256, 1024, 16_384):
        point = count, share(count)
        ax.plot(*point, "o", color=BLUE, clip_on=False)
        failure = f"a failure every\n{_days_or_hours(gpu_hours / count)}"
        text = f"{count:,}: {share(count):.0%}\n{failure}"
        if count > 1024:  # a label at its right would leave the page
            ax.annotate(text, point, (0, 8), textcoords="offset points", ha="center")
        else:
            ax.annotate(text, point, (7, 4), textcoords="offset points")
    ax.set_xscale("log", base=2)
    ticks = [2**exponent for exponent in range(0, 15, 2)]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set(xlabel="GPUs", ylabel=f"{days} days without a failure")
    ax.set(ylim=(0, 1.25), yticks=[0, 0.5, 1])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    job = f"A job of {days} days gets through"
    title = f"{job} on 64 GPUs with {share(64):.0%}, on 1,024 with {share(1024):.0%}"
    source = f"one failure in {gpu_hours:,.0f} hours of a GPU, as in Llama 3's training"
    return captioned(figure, title, f"{source}; failures at random")


def _days_or_hours(hours: float) -> str:
    """Return a time as text: in days, above two of them."""
    return f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:,.0f} hours"


def u_curve(cost: float, between: Mapping[str, float], machine: str) -> Picture:
    """Draw the share of the time that checkpoints cost, over the seconds between them.

    cost: seconds of a checkpoint, as measured on this machine; between: seconds from one failure
    to the next, by the name of that time, three at most.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    intervals = np.geomspace(1, 7200, 300)
    findings = []
    for (name, seconds), colour in zip(between.items(), (RED, BLUE, ORANGE), strict=False):
        shares = cost / intervals + intervals / (2 * seconds)
        best = math.sqrt(2 * cost * seconds)
        least = cost / best + best / (2 * seconds)
        ax.plot(intervals, shares, color=colour, linewidth=2)
        ax.plot(best, least, "o", color=colour)
        text = f"{best:.0f} s"
        ax.annotate(text, (best, least), (0, 8), textcoords="offset points", ha="center")
        ax.text(intervals[-1] * 1.1, shares[-1], f"one failure\neach {name}", va="center")
        finding = f"save every {best:.0f} s, and lose {least:.2%} of the time"
        findings.append(f"One failure each {name}: {finding}")
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="seconds between checkpoints", ylabel="share of the time lost")
    ax.set(xlim=(1, 3e4), ylim=(ax.get_ylim()[0], 1.3), xticks=[1, 10, 60, 600, 3600])
    ax.set_xticklabels(["1 s", "10 s", "1 min", "10 min", "1 h"])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda share, _: _percent(share))
    measured = f"a checkpoint takes {cost:.3f} s here: {machine}"
    loss = "lost is the saving, and half an interval a failure"
    return captioned(figure, findings[0], measured, loss)


def _percent(share: float) -> str:
    """Return a share as text, with two decimals where it is small."""
    return f"{share:.2%}" if share < 0.01 else f"{share:.0%}"
