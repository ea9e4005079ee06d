"""A communication model: the time of an epoch by number of ranks, from a few small runs, with its uncertainty.

The ranks share the work. Each step adds an all-reduce around a ring: every rank sends 2(n-1)/n times the bytes of the
gradients, and waits for n-1 neighbours. No term is negative, so n ranks are never more than n times as fast. What is
done once an epoch, whatever n is, has no term of its own: 1 = 1/n + (n-1)/n, so no times can tell it from a little
more work and more waiting. Libraries that reduce along a tree wait less at large n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from ddp_helpers.notebook.scaling import ScalingError

TERMS = {"work": "1/n", "bytes": "2(n-1)/n", "latency": "n-1"}  # each in seconds an epoch
KEPT = {"strong": "strong, the same global batch", "weak": "weak, the same batch per rank"}
ASSUMES = {  # what the terms take for granted where they are carried beyond what was measured
    "work": "n ranks do 1/n of it each",
    "data": "they keep up, for reading them is part of the work",
    "bandwidth": "one for all sizes: a byte beyond the node costs what one inside it does",
    "latency": "a ring: each further rank adds the same wait, to each step",
    "overlap": "what few ranks hid behind computing, many hide as well",
}
DRAWS = 400
NOISE = 0.05  # relative; how far a timing is off, as long as few rows tell otherwise


@dataclass(frozen=True)
class Model:
    """A fitted model. terms: seconds an epoch, by the names of TERMS. noise: the residual, relative, as one sigma."""

    terms: dict[str, float]
    noise: float
    draws: np.ndarray  # [DRAWS, 3], the terms of fits to data that could as well have been measured
    ranks: np.ndarray
    measured: np.ndarray
    scaling: str

    @property
    def assumes(self) -> dict[str, str]:
        """List the assumptions of the prediction, by subject."""
        return {"scaling": KEPT[self.scaling], **ASSUMES}

    def seconds(self, n: ArrayLike) -> np.ndarray:
        """Seconds of an epoch on n ranks; n: a number or several."""
        return parts(n, self.scaling) @ np.array(list(self.terms.values()))

    def error(self, ranks: ArrayLike, seconds: ArrayLike) -> np.ndarray:
        """The error of the prediction relative to the seconds measured: -0.1 is 10 % too fast."""
        return self.seconds(ranks) / np.asarray(seconds, float) - 1

    def efficiency(self, n: ArrayLike) -> np.ndarray:
        """Predicted efficiency of n ranks against the fewest ranks that were fitted, 1 is ideal."""
        return ideal(n, self) * self.seconds(self.ranks.min()) / self.seconds(n)

    def band(self, n: ArrayLike, within: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest seconds on n ranks, in this share of the draws."""
        tails = [(1 - within) / 2, (1 + within) / 2]
        return tuple(np.quantile(parts(n, self.scaling) @ self.draws.T, tails, axis=-1))

    def efficiency_band(self, n: ArrayLike, within: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest efficiency on n ranks, in this share of the draws; each draw against its own base."""
        base, tails = parts(self.ranks.min(), self.scaling) @ self.draws.T, [(1 - within) / 2, (1 + within) / 2]
        shares = ideal(n, self)[..., None] * base / (parts(n, self.scaling) @ self.draws.T)
        return tuple(np.quantile(shares, tails, axis=-1))

    @property
    def superlinear(self) -> str:
        """Name the fitted runs that beat the ideal by more than 5 %, which the model cannot follow; '' if none does."""
        sizes = np.unique(self.ranks)
        took = np.array([np.median(self.measured[self.ranks == size]) for size in sizes])
        gain = took[0] * sizes[0] / (took * sizes)
        if gain.max() <= 1.05:
            return ""
        n, times = sizes[gain.argmax()], gain.max() * sizes[gain.argmax()] / sizes[0]
        return f"superlinear from {sizes[0]} to {n}: {times:.1f} times as fast, which no sum of these terms can be"


def fit(ranks: Sequence[int], seconds: Sequence[float], scaling: str = "strong") -> Model:
    """The model that fits the seconds of an epoch on so many ranks best: least squares of the relative error.

    A row a run; repeats are rows of the same size. scaling: strong, the same steps an epoch on any number of ranks;
    weak, the same batch per rank, so n times fewer. Few sizes tell few terms apart: with two or three sizes it is the
    work and one other term, the one that fits best, or the first of TERMS if both do. Raises ScalingError.
    """
    ranks, seconds = np.asarray(ranks, int), np.asarray(seconds, float)
    if ranks.shape != seconds.shape or ranks.ndim != 1:
        raise ScalingError(f"{ranks.size} numbers of ranks but {seconds.size} times: give one time for each")
    if not (np.isfinite(seconds).all() and (seconds > 0).all() and (ranks > 0).all()):
        raise ScalingError("the model needs numbers of ranks and seconds above 0")
    if (sizes := len(np.unique(ranks))) < 2:
        raise ScalingError(f"{sizes} number of ranks in the runs: measure two or more to fit the model")
    terms, off = best(ranks, seconds, scaling, allowed(sizes))
    free = max(len(ranks) - np.count_nonzero(terms), 0)
    noise = float(np.sqrt(((off**2).sum() + 2 * NOISE**2) / (free + 2)))  # as if two more rows were off by NOISE
    draws = np.array(list(resampled(ranks, seconds, scaling, noise)))
    return Model(dict(zip(TERMS, terms.tolist(), strict=True)), noise, draws, ranks, seconds, scaling)


def resampled(ranks: np.ndarray, seconds: np.ndarray, scaling: str, noise: float) -> Iterator[np.ndarray]:
    """Bootstrap the fit: runs of each size drawn with replacement, sizes moved by the noise, ties broken at random.

    Without repeats the noise, which is the fit's own residual, is all that moves them. It is wide rather than narrow.
    """
    chance, sizes = np.random.default_rng(0), np.unique(ranks)
    for _ in range(DRAWS):
        rows = np.concatenate([chance.choice(np.flatnonzero(ranks == size), (ranks == size).sum()) for size in sizes])
        moved = seconds[rows] * np.exp(noise * chance.standard_normal(len(sizes)))[np.searchsorted(sizes, ranks[rows])]
        yield best(ranks[rows], moved, scaling, chance.permutation(allowed(len(sizes))))[0]


def allowed(sizes: int) -> list[tuple[int, ...]]:
    """List the sets of terms, by index, that a fit may use: the work, and as many more as the sizes determine."""
    return [(0, 1, 2)] if sizes > 3 else [(0, 1), (0, 2)]


def best(ranks: np.ndarray, seconds: np.ndarray, scaling: str, choices: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Fit each choice of terms by non-negative least squares; returns the best, and its relative residuals."""
    found = []
    matrix = parts(ranks, scaling) / seconds[:, None]
    for choice in map(list, choices):
        terms = np.zeros(len(TERMS))
        terms[choice], off = nnls(matrix[:, choice], np.ones(len(seconds)))
        found.append((round(off, 9), terms))
    terms = min(found, key=lambda one: one[0])[1]
    return terms, matrix @ terms - 1


def parts(n: ArrayLike, scaling: str) -> np.ndarray:
    """Compute the design matrix: the factor of each term on n ranks, shape [..., 3]."""
    n = np.asarray(n, float)
    steps = 1 / n if scaling == "weak" else np.ones_like(n)
    return np.stack([1 / n, steps * 2 * (n - 1) / n, steps * (n - 1)], axis=-1)


def ideal(n: ArrayLike, model: Model) -> np.ndarray:
    """The share of the work of the fewest ranks fitted that each of n ranks has."""
    return model.ranks.min() / np.asarray(n, float)


BUCKET = 25 * 2**20  # bytes that DDP reduces at a time, unless told otherwise


@dataclass(frozen=True)
class Step:
    """One optimizer step. The defaults are round numbers, for a network of ResNet-50's size.

    Left out: late ranks, other jobs on the network, the optimizer, what is done once an epoch.
    """

    compute: float = 0.18  # seconds of forward and backward on one rank's batch
    batch_bytes: float = 7e6  # of one rank's batch as it is stored: 64 images of about 110 kB
    gradient_bytes: float = 100e6  # that every rank reduces: 25 million parameters in float32
    bandwidth: float = 23e9  # bytes a second into a node; a ring enters each node once
    latency: float = 5e-6  # seconds that a message takes to the next rank
    overlap: float = 0.6  # share of the computing that can hide it: most of backward
    storage: float = 1e12  # bytes a second that all ranks together read
    strong: bool = False  # one rank's batch, shared by all; else as much for each
    tree: bool = False  # a message goes up and down a tree, not round a ring

    def seconds(self, n: ArrayLike) -> np.ndarray:
        """Seconds of a step on n ranks; n: a number or several."""
        n = np.asarray(n, float)
        share = 1 / n if self.strong else np.ones_like(n)
        hops = 2 * np.ceil(np.log2(n)) if self.tree else 2 * (n - 1)
        buckets = np.ceil(self.gradient_bytes / BUCKET)
        sent = 2 * (n - 1) / n * self.gradient_bytes
        reduced = buckets * hops * self.latency + sent / self.bandwidth
        waits = np.maximum(0, reduced - self.overlap * self.compute * share)
        read = n * share * self.batch_bytes / self.storage  # while the step before computes
        return np.maximum(self.compute * share + waits, read)

    def efficiency(self, n: ArrayLike) -> np.ndarray:
        """Samples a second per rank, against one rank alone; 1 is ideal."""
        per_rank = 1 / np.asarray(n, float) if self.strong else 1
        return per_rank * self.seconds(1) / self.seconds(n)
