"""Figures of notebook 11: attempts on a time line, the chance to survive, the cost of checkpoints."""

import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, INK, ORANGE, RED, WIDTH, rank_colour
from ddp_helpers.lessons.survive_preemption.attempts import attempts
from ddp_helpers.records.scaling import many


def attempts_timeline(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """A lane for each run, its attempts one after the other. runs: what `events` gives, by the run's name."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.6 + 0.75 * len(runs)), layout="constrained")
    labels, said = [], []
    for lane, (name, table) in enumerate(runs.items()):
        found = attempts(table)
        labels.append(f"{name}\n{many(int(found['lost_steps'].sum()), 'step')} lost")
        said += [labels[-1].replace("\n", ": ")] if len(found) > 1 else []
        for one in found.itertuples():
            draw_attempt(ax, lane, one, table[table["attempt"] == one.attempt])
        for before, after in zip(found.itertuples(), found.iloc[1:].itertuples(), strict=False):
            ax.annotate("", (after.begin, lane), (before.end, lane), arrowprops={"arrowstyle": "->", "color": GREY})
            middle = (before.end + after.begin) / 2
            ax.text(middle, lane - 0.2, f"{after.begin - before.end:.1f} s", ha="center", color=GREY)
    ax.set_yticks(range(len(runs)), labels)
    ax.set(ylim=(len(runs) - 0.5, -0.6), xlabel="seconds since the run first started", xlim=(0, None))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    said = "; ".join(said)
    about = "numbers are attempts, ticks checkpoints; hatched is work that was lost, and done again"
    return captioned(figure, said[:1].upper() + said[1:], about)


def draw_attempt(ax: Axes, lane: int, one: object, mine: pd.DataFrame) -> None:
    """One attempt in its lane: a bar with a tick for each checkpoint."""
    ax.barh(lane, one.end - one.begin, 0.5, one.begin, color=rank_colour(one.attempt - 1), alpha=0.3)
    saved = mine.loc[mine["event"] == "saved", "seconds"]
    ax.vlines(saved, lane - 0.25, lane + 0.25, color=rank_colour(one.attempt - 1), linewidth=1.8, zorder=4)
    if one.lost_steps:
        since = saved.max() if len(saved) else one.begin
        ax.barh(lane, one.end - since, 0.5, since, facecolor="white", edgecolor=RED, hatch="////", zorder=3)
    ax.text((one.begin + one.end) / 2, lane - 0.32, str(one.attempt), ha="center", va="bottom", color=INK)


def survival(gpu_hours: float, days: int = 7) -> Picture:
    """The share of jobs that meet no failure. gpu_hours: from one failure to the next, of one GPU."""

    def share(gpus: float) -> float:
        return math.exp(-days * 24 * gpus / gpu_hours)

    figure, ax = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    gpus = np.geomspace(1, 16_384, 200)
    ax.plot(gpus, [share(n) for n in gpus], color=BLUE, linewidth=2)
    for n in (8, 64, 256, 1024, 16_384):
        hours = gpu_hours / n
        often = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:,.0f} hours"
        look = {"ha": "center", "xytext": (0, 8)} if n > 1024 else {"xytext": (7, 4)}
        ax.plot(n, share(n), "o", color=BLUE, clip_on=False)
        text = f"{n:,}: {share(n):.0%}\na failure every\n{often}"
        ax.annotate(text, (n, share(n)), textcoords="offset points", **look)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2**k for k in range(0, 15, 2)], [f"{2**k:,}" for k in range(0, 15, 2)])
    ax.set(xlabel="GPUs", ylabel=f"{days} days without a failure", ylim=(0, 1.25), yticks=[0, 0.5, 1])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    title = f"A job of {days} days gets through on 64 GPUs with {share(64):.0%}, on 1,024 with {share(1024):.0%}"
    about = f"one failure in {gpu_hours:,.0f} hours of a GPU, as in Llama 3's training; failures at random"
    return captioned(figure, title, about)


def u_curve(cost: float, between: Mapping[str, float], where: str) -> Picture:
    """What saving each so many seconds costs.

    cost: seconds of a checkpoint. between: seconds from one failure to the next, by the name of that time.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    interval, said = np.geomspace(1, 7200, 300), []
    for (name, seconds), colour in zip(between.items(), (RED, BLUE, ORANGE), strict=False):
        share, best = cost / interval + interval / (2 * seconds), math.sqrt(2 * cost * seconds)
        least = cost / best + best / (2 * seconds)
        ax.plot(interval, share, color=colour, linewidth=2)
        ax.plot(best, least, "o", color=colour)
        ax.annotate(f"{best:.0f} s", (best, least), (0, 8), textcoords="offset points", ha="center")
        ax.text(interval[-1] * 1.1, share[-1], f"one failure\neach {name}", va="center")
        said.append(f"One failure each {name}: save every {best:.0f} s, and lose {least:.2%} of the time")
    ax.set(xscale="log", yscale="log", xlabel="seconds between checkpoints", ylabel="share of the time lost")
    ax.set(xlim=(1, 3e4), ylim=(ax.get_ylim()[0], 1.3), xticks=[1, 10, 60, 600, 3600])
    ax.set_xticklabels(["1 s", "10 s", "1 min", "10 min", "1 h"])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.2%}" if value < 0.01 else f"{value:.0%}")
    about = f"a checkpoint takes {cost:.3f} s here: {where}"
    return captioned(figure, said[0], about, "lost is the saving, and half an interval a failure")
