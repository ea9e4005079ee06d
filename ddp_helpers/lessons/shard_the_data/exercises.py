"""The exercises of notebook 04: a batch plan, the batches of every epoch, an exact accuracy.

`lessons.check` asks them for verdicts. The first runs in the learner's process; the other two run
on ranks that `on_ranks` forks, where every rank calls the answer.
"""

from collections.abc import Sequence
from itertools import chain

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
    sampler = _sampler(samples, shuffle=True)
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


def _sampler(samples: int, shuffle: bool) -> DistributedSampler:
    """Make this rank's sampler of so many samples."""
    return DistributedSampler(_dataset(samples), shuffle=shuffle)


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

# ---- an exact accuracy


class _Answers:
    """A model's answers to a test set, 1 where it is right; `looked_at` lists the samples read."""

    def __init__(self, right: list[int]) -> None:
        self.right = right
        self.looked_at: list[int] = []

    def __len__(self) -> int:
        return len(self.right)

    def __getitem__(self, index: int | slice) -> int | list[int]:
        samples = range(len(self.right))[index]
        self.looked_at += [samples] if isinstance(samples, int) else samples
        return self.right[index]


def exact_accuracy(right: Sequence[int]) -> float:
    """Compute the share of all samples that are right; every rank calls it, and reads its part."""
    share = _share(right)
    return sum_over_ranks(sum(share)) / sum_over_ranks(len(share))


def _share(right: Sequence[int]) -> Sequence[int]:
    """Take this rank's samples: every world_size-th, from its rank on."""
    return right[dist.get_rank() :: dist.get_world_size()]


def _accuracy_of_all(right: Sequence[int]) -> float:
    """A mistake: every rank reads all samples."""
    return sum(right[:]) / len(right)


def _not_summed(right: Sequence[int]) -> float:
    """A mistake: nothing is added up over the ranks."""
    share = _share(right)
    return sum(share) / len(share)


def _accuracy_of_padded(right: Sequence[int]) -> float:
    """A mistake: a sampler that repeats samples."""
    share = [right[sample] for sample in _sampler(len(right), shuffle=False)]
    return sum_over_ranks(sum(share)) / sum_over_ranks(len(share))


def _evaluate_on_ranks(answer: Answer, right: list[int]) -> dict[str, object]:
    """Call an answer on the ranks; return each one's result, and the samples they read: a trial."""

    def evaluate() -> list[object]:
        answers = _Answers(right)
        return [answer(answers), answers.looked_at]

    accuracies, looked_at = zip(*on_ranks(_RANKS, evaluate), strict=True)
    return {
        "accuracy on each rank": list(accuracies),
        "samples looked at": sorted(chain.from_iterable(looked_at)),
    }


_ACCURACY_TRAPS = {
    "Each rank looks at every sample: take a share of them.": _accuracy_of_all,
    "The ranks do not agree: each knows its own share alone. Add up over the ranks.": _not_summed,
    "An average of averages: add up both numbers over the ranks, and divide once.": (
        lambda right: sum_over_ranks(_not_summed(right)) / _RANKS
    ),
    "A sample counts twice, for the sampler pads. Take every world_size-th sample, from rank on.": (
        _accuracy_of_padded
    ),
}

EXERCISES = [
    Exercise(
        batch_plan,
        [(100, 2, 8), (60_000, 8, 64), (100, 2, 65), (513, 4, 64), (128, 4, 32)],
        _PLAN_TRAPS,
    ),
    OnRanks(batches_seen, [(16, 8, 2), (24, 4, 3)], _BATCHES_TRAPS, _train_on_ranks),
    OnRanks(
        exact_accuracy,
        [([1, 0, 1, 1, 0],), ([1, 1, 0, 1],)],
        _ACCURACY_TRAPS,
        _evaluate_on_ranks,
    ),
]
