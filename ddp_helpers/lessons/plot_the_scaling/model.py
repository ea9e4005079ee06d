"""A communication model: the time of an epoch by number of ranks, from a few small runs, with its uncertainty.

The ranks share the work. Each step adds an all-reduce around a ring: every rank sends 2(n-1)/n times the bytes of the
gradients, and waits for n-1 neighbours. No term is negative, so n ranks are never more than n times as fast. What is
done once an epoch, whatever n is, has no term of its own: 1 = 1/n + (n-1)/n, so no times can tell it from a little
more work and more waiting.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, darkened, scale_ranks_axis
from ddp_helpers.draw.style import BLUE, GREY, RED, SKY, WIDTH
from ddp_helpers.records.scaling import ScalingError, counted

TERMS = {"work": "1/n", "transfer": "2(n-1)/n", "waiting": "n-1"}  # each in seconds an epoch
DRAWS = 400
NOISE = 0.05  # relative; how far a timing is off, as long as few rows tell otherwise


@dataclass(frozen=True)
class Model:
    """A fitted model. terms: seconds an epoch, by the names of TERMS."""

    terms: dict[str, float]
    draws: np.ndarray  # [DRAWS, 3], the terms of fits to data that could as well have been measured
    ranks: np.ndarray
    measured: np.ndarray

    def seconds(self, n: ArrayLike) -> np.ndarray:
        """Seconds of an epoch on n ranks; n: a number or several."""
        return parts(n) @ np.array(list(self.terms.values()))

    def error(self, ranks: ArrayLike, seconds: ArrayLike) -> np.ndarray:
        """The error of the prediction relative to the seconds measured: -0.1 is 10 % too fast."""
        return self.seconds(ranks) / np.asarray(seconds, float) - 1

    def efficiency(self, n: ArrayLike) -> np.ndarray:
        """Predicted efficiency of n ranks against the fewest ranks that were fitted, 1 is ideal."""
        return efficiency(n, self.ranks.min(), np.array(list(self.terms.values())))

    def band(self, n: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest seconds on n ranks, in 90 % of the draws."""
        return tuple(np.quantile(parts(n) @ self.draws.T, [0.05, 0.95], axis=-1))

    def efficiency_band(self, n: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest efficiency on n ranks, in 90 % of the draws; each draw against its own base."""
        return tuple(np.quantile(efficiency(n, self.ranks.min(), self.draws.T), [0.05, 0.95], axis=-1))


def fit(ranks: Sequence[int], seconds: Sequence[float]) -> Model:
    """The model that fits the seconds of an epoch on so many ranks best: least squares of the relative error.

    A row a run; repeats are rows of the same size. Few sizes tell few terms apart: with two or three sizes it is the
    work and one other term, the one that fits best, or the first of TERMS if both do. Raises ScalingError.
    """
    ranks, seconds = np.asarray(ranks, int), np.asarray(seconds, float)
    if ranks.shape != seconds.shape or ranks.ndim != 1:
        raise ScalingError(f"{ranks.size} numbers of ranks but {seconds.size} times: give one time for each")
    if not (np.isfinite(seconds).all() and (seconds > 0).all() and (ranks > 0).all()):
        raise ScalingError("the model needs numbers of ranks and seconds above 0")
    if (sizes := len(np.unique(ranks))) < 2:
        raise ScalingError(f"{sizes} number of ranks in the runs: measure two or more to fit the model")
    terms, off = best(ranks, seconds, allowed(sizes))
    free = max(len(ranks) - np.count_nonzero(terms), 0)
    noise = float(np.sqrt(((off**2).sum() + 2 * NOISE**2) / (free + 2)))  # as if two more rows were off by NOISE
    draws = np.array(list(resampled(ranks, seconds, noise)))
    return Model(dict(zip(TERMS, terms.tolist(), strict=True)), draws, ranks, seconds)


def resampled(ranks: np.ndarray, seconds: np.ndarray, noise: float) -> Iterator[np.ndarray]:
    """Bootstrap the fit: runs of each size drawn with replacement, sizes moved by the noise, ties broken at random.

    Without repeats the noise, which is the fit's own residual, is all that moves them. It is wide rather than narrow.
    """
    chance, sizes = np.random.default_rng(0), np.unique(ranks)
    for _ in range(DRAWS):
        rows = np.concatenate([chance.choice(np.flatnonzero(ranks == size), (ranks == size).sum()) for size in sizes])
        moved = seconds[rows] * np.exp(noise * chance.standard_normal(len(sizes)))[np.searchsorted(sizes, ranks[rows])]
        yield best(ranks[rows], moved, chance.permutation(allowed(len(sizes))))[0]


def allowed(sizes: int) -> list[tuple[int, ...]]:
    """List the sets of terms, by index, that a fit may use: the work, and as many more as the sizes determine."""
    return [(0, 1, 2)] if sizes > 3 else [(0, 1), (0, 2)]


def best(ranks: np.ndarray, seconds: np.ndarray, choices: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Fit each choice of terms by non-negative least squares; returns the best, and its relative residuals."""
    found = []
    matrix = parts(ranks) / seconds[:, None]
    for choice in map(list, choices):
        terms = np.zeros(len(TERMS))
        terms[choice], off = nnls(matrix[:, choice], np.ones(len(seconds)))
        found.append((round(off, 9), terms))
    terms = min(found, key=lambda one: one[0])[1]
    return terms, matrix @ terms - 1


def parts(n: ArrayLike) -> np.ndarray:
    """Compute the design matrix: the factor of each term on n ranks, shape [..., 3]."""
    n = np.asarray(n, float)
    return np.stack([1 / n, 2 * (n - 1) / n, n - 1], axis=-1)


def efficiency(n: ArrayLike, base: int, terms: np.ndarray) -> np.ndarray:
    """Compute the efficiency of n ranks against the base, 1 is ideal; terms: [3], or [3, draws]."""
    return base * (parts(base) @ terms) / (np.asarray(n, float)[..., None] * parts(n) @ terms)


def prediction(
    model: Model, held_out: tuple[Sequence[int], Sequence[float]], where: str, unit: str = "GPU", left_out: str = ""
) -> Picture:
    """Draw seconds an epoch: fitted runs, the model with its band, and the runs held out, their ranks and seconds."""
    ranks, seconds = np.asarray(held_out[0], int), np.asarray(held_out[1], float)
    counts = [*model.ranks, *ranks]
    n = np.geomspace(min(counts), max(counts), 100)
    figure, ax = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    ax.fill_between(n, *model.band(n), color=SKY, alpha=0.35, linewidth=0, label="90% of fits to runs drawn again")
    ax.plot(n, model.seconds(n), color=BLUE, linewidth=2, label="the model")
    ax.plot(model.ranks, model.measured, "o", color=BLUE, markersize=8, label="fitted")
    ax.plot(ranks, seconds, "o", color=RED, label="held out", markerfacecolor="white", markeredgewidth=2, markersize=8)
    ax.set_yscale("log")
    scale_ranks_axis(ax, counts, unit)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.set_ylabel("seconds an epoch")
    ax.legend(loc="lower left")
    *fewer, last = map(str, np.unique(model.ranks))
    title = f"Fitted on {', '.join(fewer)} and {last} {unit}s: {told(model, ranks, seconds)}"
    return captioned(figure, title, where, left_out)


def told(model: Model, ranks: np.ndarray, seconds: np.ndarray) -> str:
    """What the model is worth on the rows held out: its error on the median of each size, and the band's."""
    said = []
    for size in np.unique(ranks):
        took = float(np.median(seconds[ranks == size]))
        off, (low, high) = model.error(size, took), model.band(size)
        verdict = "" if low <= took <= high else ", outside its band"
        said.append(f"{abs(off):.0%} too {'slow' if off > 0 else 'fast'} on {size}{verdict}")
    return ", ".join(said) or "nothing held out"


def reach(model: Model, about: str, published: Sequence[Mapping] = (), up_to: int = 1536) -> Picture:
    """Draw the efficiency that follows from the model, far beyond what was measured; published: of published.json."""
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    base, last = model.ranks.min(), model.ranks.max()
    n = np.geomspace(base, up_to, 200)
    ax.fill_between(n, *model.efficiency_band(n), color=SKY, alpha=0.35, linewidth=0)
    ax.plot(n, model.efficiency(n), color=BLUE, linewidth=2)
    took = np.median(model.measured[model.ranks == base])
    ax.plot(model.ranks, took * base / (model.measured * model.ranks), "o", color=BLUE, markersize=8)
    ax.axvline(last, color=GREY, linewidth=1, linestyle=":")
    ax.text(last, 1.03, " nothing fitted beyond", color=GREY, transform=ax.get_xaxis_transform())
    for one in published:
        place, look = (one["ranks"], one["efficiency"]), {"ha": "right", "va": "center", "color": GREY}
        ax.plot(*place, "s", color=GREY, markersize=7)
        ax.annotate(f"{one['name']}: {place[1]:.0%}", place, (-6, -13), textcoords="offset points", **look)
    scale_ranks_axis(ax, [base, *(count for count in (4, 16, 64, 256) if base < count < up_to), up_to], "GPU")
    ax.set_ylim(0, max(1.08, ax.get_ylim()[1]))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylabel(f"efficiency against {counted(int(base), 'GPU')}")
    low, high = (f"{float(end):.0%}" for end in model.efficiency_band(up_to))
    title = f"Fitted on {base} to {last} GPUs: on {up_to:,} anything from {low} to {high} of the ideal"
    band = f"{about}; band: 90% of fits to runs drawn again"
    return captioned(figure, title, band, "squares: published, of another model")


def assumptions(ends: Mapping[str, tuple[float, float]], few: int, many: int) -> Picture:
    """Draw a row for each set of assumptions: the efficiency on few and on many GPUs; NaN on few: a published one."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.7 + 0.36 * len(ends)), layout="constrained")
    for place, (near, far) in enumerate(ends.values()):
        ax.plot([near, far], [place, place], color=SKY, linewidth=4, zorder=1)
        ax.plot(near, place, "o", color="white", markeredgecolor=BLUE, markeredgewidth=2, markersize=8)
        square = np.isnan(near)
        ax.plot(far, place, "s" if square else "o", color=GREY if square else BLUE, markersize=8)
        ax.text(far - 0.02, place, f"{far:.0%}", ha="right", va="center", color=darkened(BLUE))
    ax.set_yticks(range(len(ends)), list(ends))
    ax.set(ylim=(len(ends) - 0.5, -0.5), xlim=(-0.1, 1.05), xticks=np.arange(0, 1.01, 0.25))
    ax.set_xlabel("efficiency against one GPU")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    found = [far for near, far in ends.values() if not np.isnan(near)]
    title = f"One assumption decides: {min(found):.0%} to {max(found):.0%} on {many:,} GPUs"
    marks = f"computed, not measured. Ring: {few} GPUs, dot: {many:,}; squares: published, of a model not named"
    return captioned(figure, title, marks)
