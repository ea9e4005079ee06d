"""The time of a step on any number of ranks, from assumptions that are named: each can be changed on its own.

The other way round from predict, which asks measured times what they are made of.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

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
