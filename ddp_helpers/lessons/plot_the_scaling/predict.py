"""A communication model: the time of an epoch by number of ranks, from a few small runs, with its uncertainty.

The ranks share the work. Each step adds an all-reduce around a ring: every rank sends 2(n-1)/n times the bytes of the
gradients, and waits for n-1 neighbours. No term is negative, so n ranks are never more than n times as fast. What is
done once an epoch, whatever n is, has no term of its own: 1 = 1/n + (n-1)/n, so no times can tell it from a little
more work and more waiting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from ddp_helpers.notebook.scaling import ScalingError

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
        return ideal(n, self) * self.seconds(self.ranks.min()) / self.seconds(n)

    def band(self, n: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest seconds on n ranks, in 90 % of the draws."""
        return tuple(np.quantile(parts(n) @ self.draws.T, [0.05, 0.95], axis=-1))

    def efficiency_band(self, n: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest efficiency on n ranks, in 90 % of the draws; each draw against its own base."""
        shares = ideal(n, self)[..., None] * (parts(self.ranks.min()) @ self.draws.T) / (parts(n) @ self.draws.T)
        return tuple(np.quantile(shares, [0.05, 0.95], axis=-1))


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


def ideal(n: ArrayLike, model: Model) -> np.ndarray:
    """The share of the work of the fewest ranks fitted that each of n ranks has."""
    return model.ranks.min() / np.asarray(n, float)
