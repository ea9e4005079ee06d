"""Fit a communication model, the seconds of an epoch by number of ranks, and draw what it predicts.

Notebook 12b and the tests call it in one process, with a few runs on few ranks.

The ranks share the work. Each step adds an all-reduce around a ring: every rank sends 2(n-1)/n
times the bytes of the gradients, and waits for n-1 neighbours. No term is negative, so n ranks are
never more than n times as fast. What is done once an epoch, on any number of ranks, has no term:
1 = 1/n + (n-1)/n, so no times can tell it from a little more work and more waiting.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from ddp_helpers import PlainError
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned, darkened, scale_ranks_axis
from ddp_helpers.draw.style import BLUE, GREY, RED, SKY, WIDTH

TERMS = {"work": "1/n", "transfer": "2(n-1)/n", "waiting": "n-1"}  # each in seconds an epoch
_DRAWS = 400
_NOISE = 0.05  # relative; how far a timing is off, as long as few rows tell otherwise
_QUANTILES = [0.05, 0.95]  # of the draws: the ends of a band

_Band = tuple[np.ndarray, np.ndarray]
_Terms = tuple[int, ...]  # indices into TERMS


@dataclass(frozen=True)
class Model:
    """A fitted model. terms: seconds an epoch, by the names of TERMS."""

    terms: dict[str, float]
    draws: np.ndarray  # [_DRAWS, 3], terms of fits to data that could as well have been measured
    ranks: np.ndarray
    measured: np.ndarray

    def seconds(self, n: ArrayLike) -> np.ndarray:
        """Compute the seconds of an epoch on n ranks; n: a number or several."""
        return term_factors(n) @ self._term_array()

    def error(self, ranks: ArrayLike, seconds: ArrayLike) -> np.ndarray:
        """Compute the error relative to the seconds measured: -0.1 is 10 % too fast."""
        return self.seconds(ranks) / np.asarray(seconds, float) - 1

    def efficiency(self, n: ArrayLike) -> np.ndarray:
        """Compute the efficiency of n ranks against the fewest that were fitted; 1 is ideal."""
        return _efficiency(n, self.ranks.min(), self._term_array())

    def band(self, n: ArrayLike) -> _Band:
        """Compute lowest and highest seconds on n ranks, in 90 % of the draws."""
        low, high = np.quantile(term_factors(n) @ self.draws.T, _QUANTILES, axis=-1)
        return low, high

    def efficiency_band(self, n: ArrayLike) -> _Band:
        """Compute lowest and highest efficiency on n ranks, in 90 % of the draws.

        Each draw is compared with its own base.
        """
        efficiencies = _efficiency(n, self.ranks.min(), self.draws.T)
        low, high = np.quantile(efficiencies, _QUANTILES, axis=-1)
        return low, high

    def _term_array(self) -> np.ndarray:
        """Return the terms in the order of TERMS, shape [3]."""
        return np.array(list(self.terms.values()))


def fit(ranks: Sequence[int] | pd.Series, seconds: Sequence[float] | pd.Series) -> Model:
    """Fit the model to the seconds of an epoch, by least squares of the relative error.

    A row a run; repeats are rows of the same size. Few sizes tell few terms apart: with two or
    three sizes it is the work and one other term, the one that fits best, or the first of TERMS if
    both do. Raises PlainError where the rows do not determine a model.
    """
    counts, times = np.asarray(ranks, int), np.asarray(seconds, float)
    sizes = _count_sizes(counts, times)
    terms, residuals = _best_fit(counts, times, _allowed_terms(sizes))
    freedom = max(len(counts) - int(np.count_nonzero(terms)), 0)
    squares = (residuals**2).sum() + 2 * _NOISE**2  # as if two more rows were off by _NOISE
    noise = float(np.sqrt(squares / (freedom + 2)))
    draws = np.array(list(_resampled_terms(counts, times, noise)))
    return Model(dict(zip(TERMS, terms.tolist(), strict=True)), draws, counts, times)


def _count_sizes(ranks: np.ndarray, seconds: np.ndarray) -> int:
    """Count the different numbers of ranks; raise PlainError if the rows cannot be fitted."""
    if ranks.shape != seconds.shape or ranks.ndim != 1:
        counts = f"{ranks.size} numbers of ranks but {seconds.size} times"
        raise PlainError(f"{counts}: give one time for each")
    if not (np.isfinite(seconds).all() and (seconds > 0).all() and (ranks > 0).all()):
        raise PlainError("the model needs numbers of ranks and seconds above 0")
    sizes = len(np.unique(ranks))
    if sizes < 2:
        lack = f"{sizes} number of ranks in the runs"
        raise PlainError(f"{lack}: measure two or more to fit the model")
    return sizes


def _resampled_terms(
    ranks: np.ndarray,
    seconds: np.ndarray,
    noise: float,
) -> Iterator[np.ndarray]:
    """Bootstrap the fit; yields the terms of each draw, shape [3].

    Runs of each size are drawn with replacement, sizes are moved by the noise, and ties are broken
    at random. Without repeats the noise, which is the fit's own residual, is all that moves them:
    it is wide rather than narrow.
    """
    random, sizes = np.random.default_rng(0), np.unique(ranks)
    runs_of_size = [np.flatnonzero(ranks == size) for size in sizes]
    for _ in range(_DRAWS):
        rows = np.concatenate([random.choice(runs, len(runs)) for runs in runs_of_size])
        factors = np.exp(noise * random.standard_normal(len(sizes)))
        moved = seconds[rows] * factors[np.searchsorted(sizes, ranks[rows])]
        choices = random.permutation(_allowed_terms(len(sizes)))
        terms, _residuals = _best_fit(ranks[rows], moved, choices)
        yield terms


def _allowed_terms(sizes: int) -> list[_Terms]:
    """List the sets of terms that a fit may use: the work, and as many as the sizes determine."""
    return [(0, 1, 2)] if sizes > 3 else [(0, 1), (0, 2)]


def _best_fit(
    ranks: np.ndarray,
    seconds: np.ndarray,
    choices: Iterable[Iterable[int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Fit each choice of terms by non-negative least squares.

    Returns the terms of the best, shape [3], and its relative residuals, one for each row.
    """
    fits = []
    matrix = term_factors(ranks) / seconds[:, None]
    for choice in map(list, choices):
        terms = np.zeros(len(TERMS))
        terms[choice], residual = nnls(matrix[:, choice], np.ones(len(seconds)))
        fits.append((round(residual, 9), terms))
    _, best_terms = min(fits, key=itemgetter(0))
    return best_terms, matrix @ best_terms - 1


def term_factors(n: ArrayLike) -> np.ndarray:
    """Compute the design matrix: the factor of each term on n ranks, shape [..., 3]."""
    n = np.asarray(n, float)
    return np.stack([1 / n, 2 * (n - 1) / n, n - 1], axis=-1)


def _efficiency(n: ArrayLike, base: int, terms: np.ndarray) -> np.ndarray:
    """Compute the efficiency of n ranks against the base, 1 is ideal; terms: [3], or [3, draws]."""
    work = np.asarray(n, float)[..., None] * term_factors(n) @ terms
    return base * (term_factors(base) @ terms) / work


def prediction(
    model: Model,
    held_out: tuple[Sequence[int] | pd.Series, Sequence[float] | pd.Series],
    where: str,
    unit: str = "GPU",
    left_out: str = "",
) -> Picture:
    """Draw seconds an epoch: fitted runs, the model with its band, and runs held out of the fit.

    held_out: their ranks and their seconds. unit: what a rank uses. where, left_out: for the
    caption.
    """
    ranks, seconds = np.asarray(held_out[0], int), np.asarray(held_out[1], float)
    counts = [*model.ranks, *ranks]
    n = np.geomspace(min(counts), max(counts), 100)
    figure, ax = plt.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    band = "90% of fits to runs drawn again"
    ax.fill_between(n, *model.band(n), color=SKY, alpha=0.35, linewidth=0, label=band)
    ax.plot(n, model.seconds(n), color=BLUE, linewidth=2, label="the model")
    ax.plot(model.ranks, model.measured, "o", color=BLUE, markersize=8, label="fitted")
    (rings,) = ax.plot(ranks, seconds, "o", color=RED, markersize=8, label="held out")
    rings.set(markerfacecolor="white", markeredgewidth=2)
    ax.set_yscale("log")
    scale_ranks_axis(ax, counts, unit)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.set_ylabel("seconds an epoch")
    ax.legend(loc="lower left")
    *fewer, last = map(str, np.unique(model.ranks))
    errors = _errors_held_out(model, ranks, seconds)
    title = f"Fitted on {', '.join(fewer)} and {last} {unit}s: {errors}"
    return captioned(figure, title, where, left_out)


def _errors_held_out(model: Model, ranks: np.ndarray, seconds: np.ndarray) -> str:
    """Write the model's error on the median of each size held out, and where its band is left."""
    errors = []
    for size in np.unique(ranks):
        middle = float(np.median(seconds[ranks == size]))
        error, (low, high) = model.error(size, middle), model.band(size)
        direction = "slow" if error > 0 else "fast"
        verdict = "" if low <= middle <= high else ", outside its band"
        errors.append(f"{abs(error):.0%} too {direction} on {size}{verdict}")
    return ", ".join(errors) or "nothing held out"


def assumptions(ends: Mapping[str, tuple[float, float]], few: int, many: int) -> Picture:
    """Draw a row for each set of assumptions: the efficiency on few and on many GPUs.

    ends: both efficiencies by the name of the set; NaN on few marks a published one.
    """
    size = WIDTH, 1.7 + 0.36 * len(ends)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    for row, (near, far) in enumerate(ends.values()):
        is_published = np.isnan(near)
        ax.plot([near, far], [row, row], color=SKY, linewidth=4, zorder=1)
        (ring,) = ax.plot(near, row, "o", color="white", markersize=8)
        ring.set(markeredgecolor=BLUE, markeredgewidth=2)
        marker, colour = ("s", GREY) if is_published else ("o", BLUE)
        ax.plot(far, row, marker, color=colour, markersize=8)
        ax.text(far - 0.02, row, f"{far:.0%}", ha="right", va="center", color=darkened(BLUE))
    ax.set_yticks(range(len(ends)), list(ends))
    ax.set(ylim=(len(ends) - 0.5, -0.5), xlim=(-0.1, 1.05), xticks=np.arange(0, 1.01, 0.25))
    ax.set_xlabel("efficiency against one GPU")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.tick_params(axis="y", length=0)
    computed = [far for near, far in ends.values() if not np.isnan(near)]
    low, high = min(computed), max(computed)
    title = f"One assumption decides: {low:.0%} to {high:.0%} on {many:,} GPUs"
    marks = f"computed, not measured. Open circle: {few} GPUs, dot: {many:,}; "
    marks += "squares: published, of a model not named"
    return captioned(figure, title, marks)
