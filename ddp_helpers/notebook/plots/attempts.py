"""Runs that took several attempts, on a time axis: work, checkpoints, what was lost, and the gaps between."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.notebook import style
from ddp_helpers.notebook.attempts import attempts
from ddp_helpers.notebook.labels import caption
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.scaling import many

style.use()
LEGEND = (
    "ticks are checkpoints, diamonds ends of epochs, arrows the time until the next attempt has started",
    "hatched is work that was lost, and done again",
)


def attempts_timeline(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """A panel for each run, a lane for each attempt. runs: what attempts.events gives, by the title of the panel."""
    tables = {title: attempts(events) for title, events in runs.items()}
    heights = [max(1, len(table)) for table in tables.values()]
    figure, panels = plt.subplots(
        len(runs),
        figsize=(9.5, 0.9 + 0.62 * len(runs) + 0.6 * sum(heights)),
        height_ratios=[height + 0.35 for height in heights],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    width = max((table["end"].max() for table in tables.values() if len(table)), default=1)
    for ax, (title, events) in zip(panels[:, 0], runs.items(), strict=True):
        ax.set_title(title, loc="left")
        _panel(ax, events, tables[title])
    panels[-1, 0].set(xlabel="seconds since the run first started", xlim=(-0.01 * width, 1.3 * width))
    caption(figure, *LEGEND)
    said = "; ".join(f"{title}: {_told(table)}" for title, table in tables.items())
    return described(figure, f"The attempts of {many(len(runs), 'run')} on a time axis, a lane for each. {said}.")


def _panel(ax: Axes, events: pd.DataFrame, table: pd.DataFrame) -> None:
    """The lanes of one run, the first attempt on top."""
    before = None
    for lane, one in enumerate(table.itertuples()):
        mine, colour = events[events["attempt"] == one.attempt], style.rank_colour(lane)
        ax.barh(lane, one.end - one.begin, 0.5, one.begin, color=colour, alpha=0.3)
        saved = mine.loc[mine["event"] == "saved", "seconds"]
        ax.vlines(saved, lane - 0.25, lane + 0.25, color=colour, linewidth=1.8, zorder=4)
        ends = mine.loc[mine["event"] == "epoch", "seconds"]
        ax.plot(ends, [lane - 0.25] * len(ends), "D", color=style.INK, markersize=5, zorder=5)
        if one.lost_steps:
            since = saved.max() if len(saved) else one.begin
            ax.barh(lane, one.end - since, 0.5, since, facecolor="white", edgecolor=style.RED, hatch="////", zorder=3)
        ax.text(one.end, lane, f"  {_end(one)}", va="center", zorder=6)
        if before is not None and one.begin > before:
            ax.annotate("", (one.begin, lane), (before, lane), arrowprops={"arrowstyle": "->", "color": style.GREY})
            middle = (before + one.begin) / 2
            ax.text(middle, lane + 0.3, f"{one.begin - before:.1f} s", ha="center", va="center", color=style.GREY)
        before = one.end
    names = [f"attempt {one.attempt}\n{many(one.ranks, 'rank')}" for one in table.itertuples()]
    ax.set(ylim=(max(1, len(table)) - 0.45, -0.6))
    ax.set_yticks(range(len(names)), names, fontsize=10)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _end(one: object) -> str:
    """How an attempt ended, in a few words."""
    at = {"unknown": "ended without a word after", "killed": "killed in", "failed": "failed in"}
    text = f"{at.get(one.ended, one.ended + ' after')} step {one.to_step}"
    if one.ended == "done":
        return text
    return f"{text}, {many(one.lost_steps, 'step')} lost" if one.ended != "unknown" else text


def _told(table: pd.DataFrame) -> str:
    """The same in words, for who cannot see it."""
    return ", then ".join(
        f"attempt {one.attempt} from second {one.begin:.1f} to {one.end:.1f}, {many(one.saves, 'checkpoint')}, "
        f"{_end(one)}"
        for one in table.itertuples()
    )
