"""Figures of notebook 09: the communication model, fitted on small runs, judged on larger ones, carried far out."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ddp_helpers.lessons.plot_the_scaling.predict import Model, Step
from ddp_helpers.notebook.drawing import BLUE, GREY, MINUS, RED, SKY, Picture, described, rank_colour
from ddp_helpers.notebook.labels import at_the_right, caption, sizes
from ddp_helpers.notebook.scaling import many


def prediction(
    model: Model,
    held_out: tuple[Sequence[int], Sequence[float]],
    where: str,
    unit: str = "GPU",
    published: Sequence[Mapping] = (),
    up_to: int = 1536,
    left_out: str = "",
) -> Picture:
    """Left: seconds an epoch, fitted and held out, with the errors. Right: the efficiency that follows, up to `up_to`.

    held_out: numbers of ranks, and the seconds measured on them. published: efficiencies of published.json.
    """
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 5), layout="constrained")
    ranks, seconds = np.asarray(held_out[0], int), np.asarray(held_out[1], float)
    near(axes[0], model, ranks, seconds, unit)
    far(axes[1], model, published, up_to, unit)
    figure.suptitle(f"Communication model, {where}", fontsize=12)
    fitted = ", ".join(map(str, np.unique(model.ranks)))
    low, high = (f"{end:.0%}" for end in model.efficiency_band(up_to))
    reach = f"at {up_to:,} {unit}s the band goes from {low} to {high} of the ideal"
    other = "grey: published, of another model on another machine" if published else ""
    about = f"fitted on {fitted} {unit}s; band: 90% of resampled fits; {reach}"
    assumed = "; ".join(f"{what}: {told}" for what, told in model.assumes.items())
    caption(figure, about, model.superlinear, f"assumed, {assumed}", other, left_out)
    alt = f"A communication model fitted on {fitted} {unit}s, {where}. Held out: {told(model, ranks, seconds, unit)}."
    return described(figure, f"{alt} {sentence(reach)} {sentence(model.superlinear)}".strip())


def near(ax: Axes, model: Model, ranks: np.ndarray, seconds: np.ndarray, unit: str) -> None:
    """The panel of the seconds: fitted points, held-out points with their error, the curve and its band."""
    counts = [*model.ranks, *ranks]
    n = np.geomspace(min(counts), max(counts), 100)
    ax.fill_between(n, *model.band(n), color=SKY, alpha=0.35, linewidth=0)
    ax.plot(n, model.seconds(n), color=BLUE, linewidth=2)
    ax.plot(model.ranks, model.measured, "o", color=BLUE, markersize=8)
    ax.plot(ranks, seconds, "o", color=RED, markerfacecolor="white", markeredgewidth=2, markersize=8)
    for size, took, predicted in judged(model, ranks, seconds):
        look = {"textcoords": "offset points", "ha": "center", "color": RED}
        ax.annotate(percent(predicted / took - 1), (size, max(seconds[ranks == size])), (0, 13), **look)
    ax.set_yscale("log")
    sizes(ax, counts, unit)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_title("seconds an epoch", loc="left")
    ax.text(0.04, 0.16, "filled: fitted", transform=ax.transAxes, color=BLUE)
    if len(ranks):
        text = "ring: held out, and the model's error"
        ax.text(0.04, 0.07, text, transform=ax.transAxes, color=RED)


def told(model: Model, ranks: np.ndarray, seconds: np.ndarray, unit: str) -> str:
    """Name the held-out rows in words."""
    said = (
        f"{many(size, unit)} {took:.3g} s measured, {predicted:.3g} s predicted ({percent(predicted / took - 1)})"
        for size, took, predicted in judged(model, ranks, seconds)
    )
    return ", ".join(said) or "nothing"


def judged(model: Model, ranks: np.ndarray, seconds: np.ndarray) -> list[tuple[int, float, float]]:
    """Each number of ranks held out, the median of its repeats, and what the model predicted."""
    return [(int(n), float(np.median(seconds[ranks == n])), float(model.seconds(n))) for n in np.unique(ranks)]


def far(ax: Axes, model: Model, published: Sequence[Mapping], up_to: int, unit: str) -> None:
    """The panel of the efficiency, far beyond what was measured."""
    n, base, last = np.geomspace(model.ranks.min(), up_to, 200), model.ranks.min(), model.ranks.max()
    ax.fill_between(n, *model.efficiency_band(n), color=SKY, alpha=0.35, linewidth=0)
    ax.plot(n, model.efficiency(n), color=BLUE, linewidth=2)
    took = np.median(model.measured[model.ranks == base])
    ax.plot(model.ranks, took * base / (model.measured * model.ranks), "o", color=BLUE, markersize=8)
    ax.axvline(last, color=GREY, linewidth=1, linestyle=":")
    ax.text(last, 0.02, " nothing fitted beyond", color=GREY, transform=ax.get_xaxis_transform())
    for one in published:
        ax.plot(one["ranks"], one["efficiency"], "s", color=GREY, markersize=7)
        text, place = f"{one['name']}: {one['efficiency']:.0%}  ", (one["ranks"], one["efficiency"])
        ax.annotate(text, place, (-6, -13), textcoords="offset points", ha="right", va="center", color=GREY)
    sizes(ax, [base, *(count for count in (4, 16, 64, 256) if base < count < up_to), up_to], unit)
    ax.set_ylim(0, max(1.08, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_title(f"efficiency against {many(int(base), unit)}", loc="left")


def assumptions(steps: Mapping[str, Step], published: Sequence[Mapping] = (), up_to: int = 1536) -> Picture:
    """The efficiency that follows from each set of assumptions, by its name; the first is drawn as the base."""
    figure, ax = plt.subplots(figsize=(10.5, 5), layout="constrained")
    n, labels = np.geomspace(1, up_to, 300), []
    for place, (name, step) in enumerate(steps.items()):
        colour, end = rank_colour(place), float(step.efficiency(up_to))
        ax.plot(n, step.efficiency(n), color=colour, linewidth=2 if place else 4)
        labels.append((up_to, end, f"{name}: {end:.0%}", colour))
    for one in published:
        ax.plot(one["ranks"], one["efficiency"], "s", color=GREY, markersize=8, zorder=3)
        text = f"published, {one['name']}: {one['efficiency']:.0%}"
        labels.append((one["ranks"], one["efficiency"], text, GREY))
    sizes(ax, [1, *(count for count in (6, 24, 96, 384) if count < up_to), up_to], "GPU")
    ax.set(ylim=(0, 1.08), ylabel="efficiency against one GPU")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    at_the_right(ax, labels)
    figure.suptitle("The same step with an assumption changed", fontsize=12)
    squares = "squares: published, of a model that is not named" if published else ""
    caption(figure, "lines: computed, not measured", squares)
    said = "; ".join(text for _, _, text, _ in labels)
    return described(figure, f"Efficiency on {up_to:,} GPUs that follows from named assumptions: {said}.")


def percent(error: float) -> str:
    """A relative error with its sign."""
    return f"{'+' if error > 0 else MINUS}{abs(error):.0%}"


def sentence(text: str) -> str:
    """The text with a capital and a full stop, if there is any."""
    return f"{text[0].upper()}{text[1:]}." if text else ""
