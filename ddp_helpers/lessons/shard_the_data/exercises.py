"""Exercises of notebook 04: a batch plan, the batches of every epoch, and an exact accuracy over ranks."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks, summed

RANKS = 2  # of the exercises that run on ranks

# ---- the exercises


class Answers:
    """A model's answers to a test set, 1 where it is right; `looked_at` has the samples that were asked for."""

    def __init__(self, right: list[int]) -> None:
        self.right, self.looked_at = right, []

    def __len__(self) -> int:
        return len(self.right)

    def __getitem__(self, sample: int | slice) -> int | list[int]:
        found, places = self.right[sample], range(len(self.right))[sample]
        self.looked_at += [places] if isinstance(places, int) else places
        return found


def batch_plan(samples: int, world_size: int, global_batch: int) -> dict[str, int] | None:
    """Compute a rank's epoch: per_rank batch, samples in its shard, steps, last_batch. None if uneven."""
    return None if global_batch % world_size else plan(-(-samples // world_size), global_batch // world_size)


def plan(shard: int, per_rank: int) -> dict[str, int]:
    """The plan for a shard and a per-rank batch."""
    steps = -(-shard // per_rank)
    return {"per_rank": per_rank, "shard": shard, "steps": steps, "last_batch": shard - (steps - 1) * per_rank}


def batches_seen(samples: int, global_batch: int, epochs: int) -> list[list[list[int]]]:
    """The samples of each batch that this rank sees: a list of batches for each epoch."""
    return passes(samples, global_batch // dist.get_world_size(), epochs)


def passes(samples: int, batch: int, epochs: int, deal: bool = True, tell: bool = True) -> list[list[list[int]]]:
    """The batches of each epoch, with a sampler that deals and is told the epoch, or without."""
    sampler, seen = DistributedSampler(range(samples)) if deal else None, []
    loader = DataLoader(range(samples), batch, sampler=sampler, shuffle=not deal)
    for epoch in range(epochs):
        if deal and tell:
            sampler.set_epoch(epoch)
        seen.append([one.tolist() for one in loader])
    return seen


def train_on_ranks(answer: Callable, samples: int, global_batch: int, epochs: int) -> dict[str, object]:
    """Call an answer on the ranks, and sum up what they have seen in training."""
    found = on_ranks(RANKS, lambda: answer(samples, global_batch, epochs))
    by_rank = [[list(chain.from_iterable(epoch)) for epoch in given] for given in found]
    dealt = [sorted(chain.from_iterable(shards)) for shards in zip(*by_rank, strict=True)]
    return {
        "largest batch of each rank": [max(len(batch) for epoch in given for batch in epoch) for given in found],
        "epochs with each sample once": dealt.count(list(range(samples))),
        "different epochs on rank 0": len(set(map(tuple, by_rank[0]))),
    }


def exact_accuracy(right: Sequence[int]) -> float:
    """Share of all samples that are right, on every rank, of which this one looks at its own alone."""
    mine = right[dist.get_rank() :: dist.get_world_size()]
    return summed(sum(mine)) / summed(len(mine))


def own_share(right: Sequence[int]) -> float:
    """A mistake: nothing is added up over the ranks."""
    mine = right[dist.get_rank() :: dist.get_world_size()]
    return sum(mine) / len(mine)


def padded(right: Sequence[int]) -> float:
    """A mistake: a sampler that repeats samples."""
    mine = [right[sample] for sample in DistributedSampler(range(len(right)), shuffle=False)]
    return summed(sum(mine)) / summed(len(mine))


def evaluate_on_ranks(answer: Callable, right: list[int]) -> dict[str, object]:
    """Call an answer on the ranks: what each gives, and which samples they looked at."""

    def on_one() -> list:
        answers = Answers(right)
        return [answer(answers), answers.looked_at]

    given, looked_at = zip(*on_ranks(RANKS, on_one), strict=True)
    return {"accuracy on each rank": list(given), "samples looked at": sorted(chain.from_iterable(looked_at))}


TOO_LARGE = "A rank takes its part of the global batch, not all of it."
EXERCISES = [
    Exercise(
        batch_plan,
        [(100, 2, 8), (60_000, 8, 64), (100, 2, 65), (513, 4, 64), (128, 4, 32)],
        {
            "A batch that the ranks cannot share evenly has no plan: give None.": (
                lambda samples, ranks, batch: plan(-(-samples // ranks), batch // ranks)
            ),
            "The sampler pads, so the shard is rounded up.": (
                lambda samples, ranks, batch: None if batch % ranks else plan(samples // ranks, batch // ranks)
            ),
            TOO_LARGE: lambda samples, ranks, batch: None if batch % ranks else plan(-(-samples // ranks), batch),
        },
    ),
    OnRanks(
        batches_seen,
        [(16, 8, 2), (24, 4, 3)],
        {
            "Each rank goes through all samples: the loader needs a DistributedSampler.": (
                lambda samples, batch, epochs: passes(samples, batch // RANKS, epochs, deal=False)
            ),
            "Every epoch has the same order: call set_epoch before each pass.": (
                lambda samples, batch, epochs: passes(samples, batch // RANKS, epochs, tell=False)
            ),
            TOO_LARGE: passes,
        },
        train_on_ranks,
    ),
    OnRanks(
        exact_accuracy,
        [([1, 0, 1, 1, 0],), ([1, 1, 0, 1],)],
        {
            "Each rank looks at every sample: take a share of them.": lambda right: sum(right[:]) / len(right),
            "The ranks do not agree: each knows its own share alone. Add up over the ranks.": own_share,
            "An average of averages: add up both numbers over the ranks, and divide once.": (
                lambda right: summed(own_share(right)) / RANKS
            ),
            "A sample counts twice, for the sampler pads. Take every world_size-th sample, from rank on.": padded,
        },
        evaluate_on_ranks,
    ),
]
