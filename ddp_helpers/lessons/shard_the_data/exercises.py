"""The exercises of notebook 04: a batch plan, the batches of every epoch, a loss by tokens.

`lessons.check` asks them for verdicts. The first runs in the driver process; the others are
trials, which run on every rank and have the name of their exercise.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks, sum_of_all

_BATCH_TOO_LARGE = "A rank takes its part of the global batch, not all of it."

# ---- a batch plan


def batch_plan(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """Compute a rank's epoch: per_rank batch, samples in its shard, steps, last_batch.

    None if the ranks cannot share the global batch evenly.
    """
    if global_batch % world_size:
        return None
    return _plan(-(-samples // world_size), global_batch // world_size)


def _plan(shard: int, per_rank: int) -> dict[str, int]:
    """Compute the plan for a shard of `shard` samples and a per-rank batch."""
    steps = -(-shard // per_rank)
    last_batch = shard - (steps - 1) * per_rank
    return {"per_rank": per_rank, "shard": shard, "steps": steps, "last_batch": last_batch}


_PLAN_CASES = [(100, 2, 8), (60_000, 8, 64), (100, 2, 65), (513, 4, 64), (128, 4, 32)]
_PLAN_TRAPS: dict[str, Answer] = {
    "A batch that the ranks cannot share evenly has no plan: return None.": (
        lambda samples, ranks, batch: _plan(-(-samples // ranks), batch // ranks)
    ),
    "The sampler pads, so the shard is rounded up.": (
        lambda samples, ranks, batch: (
            None if batch % ranks else _plan(samples // ranks, batch // ranks)
        )
    ),
    _BATCH_TOO_LARGE: (
        lambda samples, ranks, batch: None if batch % ranks else _plan(-(-samples // ranks), batch)
    ),
}

# ---- the batches of every epoch


def batches_seen(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare what the ranks saw together: each sample once, in a new order each epoch."""
    size = dist.get_world_size()
    for samples, global_batch, epochs in ((24, 12, 2), (36, 6, 3)):
        seen_here: Any = answer(samples, global_batch, epochs)
        yield Comparison("what it returns", type(seen_here).__name__, "list")
        mine = [[list(map(int, batch)) for batch in epoch] for epoch in seen_here]
        yield Comparison("epochs that it returns", len(mine), epochs)
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, mine)
        largest = max(len(batch) for epoch in mine for batch in epoch)
        known: dict[str, object] = {_BATCH_TOO_LARGE: global_batch}
        yield Comparison("the largest batch of this rank", largest, global_batch // size, known)
        for epoch in range(epochs):
            seen = sorted(chain(*(chain(*of_rank[epoch]) for of_rank in everybody)))
            known = {_NO_SAMPLER: sorted([*range(samples)] * size)}
            what = f"the samples of epoch {epoch}, of all ranks"
            yield Comparison(what, seen, [*range(samples)], known)
        orders = {tuple(chain(*epoch)) for epoch in mine}
        yield Comparison("different orders on this rank", len(orders), epochs, {_SAME_ORDER: 1})


_NO_SAMPLER = "Each rank goes through all samples: the loader needs a DistributedSampler."
_SAME_ORDER = "Every epoch has the same order: call set_epoch before each pass."

# ---- a loss whose ranks have unequal counts

_TERMS = [  # losses, and which of them count: of three ranks, and with one rank without terms
    ([[2.0, 4.0, 6.0], [8.0, 9.0, 9.0], [3.0, 8.0, 1.0]], [[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
    ([[1.0, 3.0], [7.0, 7.0], [6.0, 9.0]], [[1, 1], [0, 0], [1, 0]]),
]


def token_loss(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare the gradient that DDP averages with the mean over the terms of all ranks.

    Each loss is a weight of 1 times a number, so the right gradient is the mean of these numbers.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for losses, counted in _TERMS:
        weight = torch.ones((), requires_grad=True)
        loss: Any = answer(weight * torch.tensor(losses[rank]), torch.tensor(counted[rank]) > 0)
        has_gradient = isinstance(loss, torch.Tensor) and loss.requires_grad
        yield Comparison("whether the loss has a gradient", has_gradient, True)
        loss.backward()
        gradient = torch.zeros(()) if weight.grad is None else weight.grad
        averaged = sum_of_all(gradient).item() / size
        pairs = [list(zip(*rows, strict=True)) for rows in zip(losses, counted, strict=True)][:size]
        terms = [[loss for loss, counts in of_rank if counts] for of_rank in pairs]
        right = sum(map(sum, terms)) / sum(map(len, terms))
        own_means = sum(sum(own) / len(own) for own in terms if own)
        everything = [loss for of_rank in pairs for loss, _ in of_rank]
        known = {
            "A mean of means: divide by the number of terms of all ranks.": own_means / size,
            "DDP divides by the number of ranks: multiply by it.": right / size,
            "These are one rank's terms: add up their number over all ranks.": own_means,
            "The padding counts: leave out the terms where counted is False.": (
                sum(everything) / len(everything)
            ),
        }
        yield Comparison("the averaged gradient", averaged, right, known)


EXERCISES = [
    Exercise(batch_plan, _PLAN_CASES, _PLAN_TRAPS),
    on_real_ranks(batches_seen),
    on_real_ranks(token_loss),
]
