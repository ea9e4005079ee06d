"""Figures of notebook 09: the communication model, fitted on small runs, judged on larger ones, carried far out."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

from ddp_helpers.lessons.plot_the_scaling.predict import Model
from ddp_helpers.notebook.drawing import BLUE, GREY, RED, SKY, WIDTH, Picture, described
from ddp_helpers.notebook.labels import caption, dark, finding, sizes
from ddp_helpers.notebook.scaling import many


def prediction(
    model: Model, held_out: tuple[Sequence[int], Sequence[float]], where: str, unit: str = "GPU", left_out: str = ""
) -> Picture:
    """Seconds an epoch: fitted runs, the model with its band, and the runs held out: their ranks, their seconds."""
    ranks, seconds = np.asarray(held_out[0], int), np.asarray(held_out[1], float)
    counts = [*model.ranks, *ranks]
    n = np.geomspace(min(counts), max(counts), 100)
    figure, ax = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    ax.fill_between(n, *model.band(n), color=SKY, alpha=0.35, linewidth=0, label="90% of fits to runs drawn again")
    ax.plot(n, model.seconds(n), color=BLUE, linewidth=2, label="the model")
    ax.plot(model.ranks, model.measured, "o", color=BLUE, markersize=8, label="fitted")
    look = {"markerfacecolor": "white", "markeredgewidth": 2, "markersize": 8}
    ax.plot(ranks, seconds, "o", color=RED, label="held out", **look)
    ax.set_yscale("log")
    sizes(ax, counts, unit)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.set_ylabel("seconds an epoch")
    ax.legend(loc="lower left")
    *fewer, last = map(str, np.unique(model.ranks))
    title = f"Fitted on {', '.join(fewer)} and {last} {unit}s: {told(model, ranks, seconds)}"
    finding(figure, title)
    caption(figure, where, left_out)
    return described(figure, f"{title}. A communication model, {where}.")


def told(model: Model, ranks: np.ndarray, seconds: np.ndarray) -> str:
    """What the model is worth on the rows held out: its error on the median of each size, and the band's."""
    said = []
    for size in np.unique(ranks):
        took = float(np.median(seconds[ranks == size]))
        off, (low, high) = float(model.seconds(size)) / took - 1, model.band(size)
        verdict = "" if low <= took <= high else ", outside its band"
        said.append(f"{abs(off):.0%} too {'slow' if off > 0 else 'fast'} on {size}{verdict}")
    return ", ".join(said) or "nothing held out"


def reach(model: Model, about: str, published: Sequence[Mapping] = (), up_to: int = 1536) -> Picture:
    """The efficiency that follows from the model, far beyond what was measured; published: of published.json."""
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    n, base, last = np.geomspace(model.ranks.min(), up_to, 200), model.ranks.min(), model.ranks.max()
    ax.fill_between(n, *model.efficiency_band(n), color=SKY, alpha=0.35, linewidth=0)
    ax.plot(n, model.efficiency(n), color=BLUE, linewidth=2)
    took = np.median(model.measured[model.ranks == base])
    ax.plot(model.ranks, took * base / (model.measured * model.ranks), "o", color=BLUE, markersize=8)
    ax.axvline(last, color=GREY, linewidth=1, linestyle=":")
    ax.text(last, 1.03, " nothing fitted beyond", color=GREY, transform=ax.get_xaxis_transform())
    for one in published:
        ax.plot(one["ranks"], one["efficiency"], "s", color=GREY, markersize=7)
        place = (one["ranks"], one["efficiency"])
        text = f"{one['name']}: {one['efficiency']:.0%}"
        ax.annotate(text, place, (-6, -13), textcoords="offset points", ha="right", va="center", color=GREY)
    sizes(ax, [base, *(count for count in (4, 16, 64, 256) if base < count < up_to), up_to], "GPU")
    ax.set_ylim(0, max(1.08, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylabel(f"efficiency against {many(int(base), 'GPU')}")
    low, high = (f"{float(end):.0%}" for end in model.efficiency_band(up_to))
    title = f"Fitted on {base} to {last} GPUs: on {up_to:,} anything from {low} to {high} of the ideal"
    finding(figure, title)
    caption(figure, f"{about}; band: 90% of fits to runs drawn again", "squares: published, of another model")
    return described(figure, f"{title}. {about}.")


def assumptions(ends: Mapping[str, tuple[float, float]], few: int, many: int) -> Picture:
    """A row for each set of assumptions: the efficiency on few and on many GPUs. Of a published one: on many alone."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.7 + 0.36 * len(ends)), layout="constrained")
    for place, (near, far) in enumerate(ends.values()):
        ax.plot([near, far], [place, place], color=SKY, linewidth=4, zorder=1)
        ax.plot(near, place, "o", color="white", markeredgecolor=BLUE, markeredgewidth=2, markersize=8)
        square = np.isnan(near)
        ax.plot(far, place, "s" if square else "o", color=GREY if square else BLUE, markersize=8)
        ax.text(far - 0.02, place, f"{far:.0%}", ha="right", va="center", color=dark(BLUE))
    ax.set_yticks(range(len(ends)), list(ends))
    ax.set(
        ylim=(len(ends) - 0.5, -0.5),
        xlim=(-0.1, 1.05),
        xticks=np.arange(0, 1.01, 0.25),
        xlabel="efficiency against one GPU",
    )
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    found = [far for near, far in ends.values() if not np.isnan(near)]
    title = f"One assumption decides: {min(found):.0%} to {max(found):.0%} on {many:,} GPUs"
    finding(figure, title)
    caption(
        figure, f"computed, not measured. Ring: {few} GPUs, dot: {many:,}; squares: published, of a model not named"
    )
    return described(figure, f"{title}. " + "; ".join(f"{name}: {far:.0%}" for name, (_, far) in ends.items()) + ".")
