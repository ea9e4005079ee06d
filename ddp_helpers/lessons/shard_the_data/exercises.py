"""The exercises of notebook 04: a batch plan, the batches of every epoch, a loss by tokens.

`lessons.check` asks them for verdicts. The first runs in the learner's process; the other two run
on ranks that `on_ranks` forks, where every rank calls the answer.
"""

import math
from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks, sum_over_ranks

_RANKS = 2  # of the exercises that run on ranks
_BATCH_TOO_LARGE = "A rank takes its part of the global batch, not all of it."

Batches = list[list[int]]  # of one epoch: the samples of each batch

# ---- a batch plan


def batch_plan(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """Compute a rank's epoch: per_rank batch, samples in its shard, steps, last_batch.

    None if the ranks cannot share the global batch evenly.
    """
    if global_batch % world_size:
        return None
    return _plan(-(-samples // world_size), global_batch // world_size)


def _plan(shard: int, per_rank: int) -> dict[str, int]:
    """Compute the plan for a shard of so many samples and a per-rank batch."""
    steps = -(-shard // per_rank)
    last_batch = shard - (steps - 1) * per_rank
    return {"per_rank": per_rank, "shard": shard, "steps": steps, "last_batch": last_batch}


def _plan_if_even(shard: int, world_size: int, global_batch: int, per_rank: int) -> dict | None:
    """Compute the plan for a shard and a per-rank batch, or None as batch_plan does."""
    return None if global_batch % world_size else _plan(shard, per_rank)


def _plan_with_global_batch(samples: int, world_size: int, global_batch: int) -> dict | None:
    """A mistake: each rank takes the whole global batch."""
    return _plan_if_even(-(-samples // world_size), world_size, global_batch, global_batch)


_PLAN_TRAPS = {
    "A batch that the ranks cannot share evenly has no plan: give None.": (
        lambda samples, ranks, batch: _plan(-(-samples // ranks), batch // ranks)
    ),
    "The sampler pads, so the shard is rounded up.": (
        lambda samples, ranks, batch: _plan_if_even(samples // ranks, ranks, batch, batch // ranks)
    ),
    _BATCH_TOO_LARGE: _plan_with_global_batch,
}

# ---- the batches of every epoch


def batches_seen(samples: int, global_batch: int, epochs: int) -> list[Batches]:
    """List the samples of each batch that this rank sees, for each epoch; every rank calls it."""
    return _passes(samples, global_batch // dist.get_world_size(), epochs)


def _passes(samples: int, batch: int, epochs: int, set_epoch: bool = True) -> list[Batches]:
    """List this rank's batches of each epoch; without set_epoch, a mistake, all have one order."""
    sampler: DistributedSampler[int] = DistributedSampler(_dataset(samples))
    batches = []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        batches.append(_one_pass(samples, batch, sampler))
    return batches


def _no_sampler(samples: int, global_batch: int, epochs: int) -> list[Batches]:
    """A mistake: each rank goes through all samples."""
    return [_one_pass(samples, global_batch // _RANKS, None) for _ in range(epochs)]


def _one_pass(samples: int, batch: int, sampler: Sampler | None) -> Batches:
    """List the batches of one pass, shuffled by the loader where there is no sampler."""
    loader = DataLoader(_dataset(samples), batch, shuffle=sampler is None, sampler=sampler)
    return [indices.tolist() for indices in loader]


def _dataset(samples: int) -> Dataset[int]:
    """Make a dataset in which each sample is its own number."""
    return range(samples)  # type: ignore[return-value]  # it has all that a loader calls


def _train_on_ranks(
    answer: Answer,
    samples: int,
    global_batch: int,
    epochs: int,
) -> dict[str, object]:
    """Call an answer on the ranks, and sum up what they have seen in training: a trial."""
    batches = on_ranks(_RANKS, lambda: answer(samples, global_batch, epochs))
    shards = [[list(chain.from_iterable(epoch)) for epoch in of_rank] for of_rank in batches]
    by_epoch = [sorted(chain.from_iterable(epoch)) for epoch in zip(*shards, strict=True)]
    sizes = [[len(batch) for epoch in of_rank for batch in epoch] for of_rank in batches]
    return {
        "largest batch of each rank": list(map(max, sizes)),
        "epochs with each sample once": by_epoch.count(list(range(samples))),
        "different epochs on rank 0": len(set(map(tuple, shards[0]))),
    }


_BATCHES_TRAPS = {
    "Each rank goes through all samples: the loader needs a DistributedSampler.": _no_sampler,
    "Every epoch has the same order: call set_epoch before each pass.": (
        lambda samples, batch, epochs: _passes(samples, batch // _RANKS, epochs, set_epoch=False)
    ),
    _BATCH_TOO_LARGE: _passes,
}

# ---- a loss whose ranks have unequal counts


def token_loss(losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Compute the loss for backward, so that DDP's average is the mean over the terms of all ranks.

    losses: this rank's, a term each; counted: False where a term is padding. Every rank calls it.
    """
    own = losses[counted]
    return own.sum() * dist.get_world_size() / sum_over_ranks(len(own))


def _without_world_size(losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """A mistake: DDP's division by the number of ranks is not undone."""
    return token_loss(losses, counted) / dist.get_world_size()


def _own_terms(losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """A mistake: the sum is divided by the terms of this rank alone."""
    return losses[counted].sum() * dist.get_world_size() / counted.sum()


def _without_an_empty_rank(losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """A mistake: a rank without a term does not call all_reduce."""
    return token_loss(losses, counted) if counted.any() else 0 * losses.sum()


def _averaged_gradient(
    answer: Callable[..., torch.Tensor],
    losses: list[list[float]],
    counted: list[list[bool]],
) -> dict[str, object]:
    """Call backward on an answer on the ranks; average the gradients, as DDP does: a trial.

    Each loss is a weight of 1 times a number, so the right gradient is the mean of these numbers.
    """

    def gradient() -> float:
        weight, rank = torch.ones((), requires_grad=True), dist.get_rank()
        loss = answer(weight * torch.tensor(losses[rank]), torch.tensor(counted[rank]))
        loss.backward()
        return 0.0 if weight.grad is None else weight.grad.item()

    try:
        gradients = on_ranks(len(losses), gradient)
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, RuntimeError) and "by peer" not in str(error):
            raise
        return {"averaged gradient": "none: a rank waits in all_reduce for one that is gone"}
    mean = sum(gradients) / len(gradients)
    return {"averaged gradient": "nan" if math.isnan(mean) else mean}


_LOSS_TRAPS = {
    "A mean of means: divide by the number of terms of all ranks.": (
        lambda losses, counted: losses[counted].mean()
    ),
    "DDP divides by the number of ranks: multiply by it.": _without_world_size,
    "These are the terms of one rank: add up their number over all ranks.": _own_terms,
    "A mean of means, and 0 / 0 on a rank without any term: divide by the terms of all ranks.": (
        lambda losses, counted: (losses * counted).sum() / counted.sum()
    ),
    "The padding counts: leave out the terms where counted is False.": (
        lambda losses, counted: token_loss(losses, torch.ones_like(counted))
    ),
    "A rank without any term has to call all_reduce, too.": _without_an_empty_rank,
}

EXERCISES = [
    Exercise(
        batch_plan,
        [(100, 2, 8), (60_000, 8, 64), (100, 2, 65), (513, 4, 64), (128, 4, 32)],
        _PLAN_TRAPS,
    ),
    OnRanks(batches_seen, [(16, 8, 2), (24, 4, 3)], _BATCHES_TRAPS, _train_on_ranks),
    OnRanks(
        token_loss,
        [
            ([[2.0, 4.0, 6.0], [8.0, 9.0, 9.0]], [[True, True, True], [True, False, False]]),
            ([[1.0, 3.0], [7.0, 7.0]], [[True, True], [False, False]]),
            ([[1.0, 2.0], [6.0, 9.0], [3.0, 8.0]], [[True, True], [True, False], [True, True]]),
        ],
        _LOSS_TRAPS,
        _averaged_gradient,
    ),
]
