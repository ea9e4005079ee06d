"""Figures of 11b: attempts on a time line, the chance to survive, the cost of checkpoints.

The notebook draws them; they need no ranks.
"""

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


def attempts_timeline(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """Draw a lane for each run, its attempts one after the other.

    runs: by the run's name, the table of `read_events`.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 1.6 + 0.75 * len(runs)), layout="constrained")
    labels, findings = [], []
    for lane, (name, table) in enumerate(runs.items()):
        attempts = list_attempts(table)
        seconds_lost = sum(attempt.lost_seconds for attempt in attempts)
        lost = f"{seconds_lost:.1f} s lost" if seconds_lost else "nothing lost"
        labels.append(f"{name}\n{lost}")
        if len(attempts) > 1:
            findings.append(f"{name}: {lost}")
        saves = table[table["event"] == "saved"]["seconds"]
        ax.vlines(saves, lane - 0.25, lane + 0.25, color=INK, linewidth=1.8, zorder=4)
        for attempt in attempts:
            _draw_attempt(ax, lane, attempt)
        for before, after in pairwise(attempts):
            arrow = {"arrowstyle": "->", "color": GREY}
            ax.annotate("", (after.begin, lane), (before.end, lane), arrowprops=arrow)
            text = f"{after.begin - before.end:.1f} s"
            ax.text((before.end + after.begin) / 2, lane - 0.2, text, ha="center", color=GREY)
    ax.set_yticks(range(len(runs)), labels)
    ax.set(ylim=(len(runs) - 0.5, -0.6), xlim=(0, None))
    ax.set(xlabel="seconds since the run first started")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    title = "; ".join(findings)
    title = title[:1].upper() + title[1:]
    legend = "numbers are attempts, ticks checkpoints"
    return captioned(figure, title, f"{legend}; hatched: work that was lost and done again")


def _draw_attempt(ax: Axes, lane: int, attempt: Attempt) -> None:
    """Draw an attempt in its lane: a bar with its number; the lost part is hatched."""
    colour, seconds = rank_colour(attempt.attempt - 1), attempt.end - attempt.begin
    ax.barh(lane, seconds, 0.5, attempt.begin, color=colour, alpha=0.3)
    middle = attempt.begin + seconds / 2
    ax.text(middle, lane - 0.32, str(attempt.attempt), ha="center", va="bottom", color=INK)
    if lost := attempt.lost_seconds:
        (bar,) = ax.barh(lane, lost, 0.5, attempt.end - lost, zorder=3)
        bar.set(facecolor="white", edgecolor=RED, hatch="////")


def survival(gpu_hours: float, days: int = 7) -> Picture:
    """Draw the share of jobs without a failure, over the number of their GPUs.

    gpu_hours: hours from one failure of a GPU to its next; days: how long a job runs.
    """
    counts = 2.0 ** np.linspace(0, 14, 200)
    marked = np.array([8, 64, 256, 1024, 16_384])
    curve, shares = (np.exp(-days * 24 * gpus / gpu_hours) for gpus in (counts, marked))
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    ax.plot(counts, curve, color=BLUE, linewidth=2)
    ax.plot(marked, shares, "o", color=BLUE, clip_on=False)
    for count, share in zip(marked, shares, strict=True):
        hours = gpu_hours / count
        gap = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:,.0f} hours"
        text = f"{count:,}: {share:.0%}\na failure every\n{gap}"
        ax.annotate(text, (count, share), (7, 4), textcoords="offset points")
    ax.set_xscale("log", base=2)
    ticks = [2**exponent for exponent in range(0, 15, 2)]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set(xlabel="GPUs", ylabel=f"{days} days without a failure", xlim=(0.8, 90_000))
    ax.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    ax.set_ylim(0, 1.25)
    job = f"A job of {days} days gets through"
    title = f"{job} on 64 GPUs with {shares[1]:.0%}, on 1,024 with {shares[3]:.0%}"
    source = f"one failure in {gpu_hours:,.0f} hours of a GPU, as in Llama 3's training"
    return captioned(figure, title, f"{source}; failures at random")


def u_curve(cost: float, between: Mapping[str, float], machine: str) -> Picture:
    """Draw the share of the time that checkpoints cost, over the seconds between them.

    cost: seconds of a checkpoint, as measured on this machine; between: seconds from one failure
    to the next, by the name of that time, three at most.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    intervals = np.geomspace(1, 7200, 300)
    findings = []
    for (name, seconds), colour in zip(between.items(), (RED, BLUE, ORANGE), strict=False):
        best = np.sqrt(2 * cost * seconds)
        shares, least = (cost / each + each / (2 * seconds) for each in (intervals, best))
        ax.plot(intervals, shares, color=colour, linewidth=2)
        ax.plot(best, least, "o", color=colour)
        text = f"{best:.0f} s"
        ax.annotate(text, (best, least), (0, 8), textcoords="offset points", ha="center")
        ax.text(8000, shares[-1], f"one failure\nper {name}", va="center")
        finding = f"save every {best:.0f} s, and lose {least:.2%} of the time"
        findings.append(f"One failure per {name}: {finding}")
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="seconds between checkpoints", ylabel="share of the time lost")
    ax.set(xlim=(1, 3e4), ylim=(ax.get_ylim()[0], 1.3))
    ax.set_xticks([1, 10, 60, 600, 3600], ["1 s", "10 s", "1 min", "10 min", "1 h"])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    measured = f"a checkpoint takes {cost:.3f} s here: {machine}"
    loss = "lost: the saves, and half an interval per failure"
    return captioned(figure, findings[0], measured, loss)
