"""An exercise of notebook 12: which samples each worker of each rank takes, on real ranks."""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch.distributed as dist

from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks

SIZES = (2, 3)  # ranks, of each case


def my_samples(n: int, num_workers: int, worker_id: int) -> list[int]:
    """Pick the samples, of n, that this worker of this rank takes; every worker calls it."""
    reader = dist.get_rank() * num_workers + worker_id
    return list(range(reader, n, dist.get_world_size() * num_workers))


def by_worker(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: the ranks take the same."""
    return list(range(worker_id, n, num_workers))


def by_rank(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: the workers of a rank take the same."""
    return list(range(dist.get_rank(), n, dist.get_world_size()))


def in_chunks(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: what is left over after equal chunks."""
    each = n // (dist.get_world_size() * num_workers)
    reader = dist.get_rank() * num_workers + worker_id
    return list(range(reader * each, (reader + 1) * each))


def rest_to_the_last(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: the last reader has more than the others."""
    readers, taken = dist.get_world_size() * num_workers, in_chunks(n, num_workers, worker_id)
    last = dist.get_rank() * num_workers + worker_id == readers - 1
    return taken + list(range(n - n % readers, n)) if last else taken


def on_all_readers(answer: Callable, n: int, num_workers: int) -> dict[str, list]:
    """Call an answer for each worker of each rank, and count what they take: on two ranks, then on three."""
    found: dict[str, list] = {"never seen": [], "seen twice": [], "not of the n": [], "even shares": []}
    for size in SIZES:
        taken = on_ranks(size, lambda: [list(answer(n, num_workers, worker)) for worker in range(num_workers)])
        shares = list(chain.from_iterable(taken))
        times = Counter(chain.from_iterable(shares))
        found["never seen"].append(len(set(range(n)) - times.keys()))
        found["seen twice"].append(sum(count > 1 for count in times.values()))
        found["not of the n"].append(len(times.keys() - set(range(n))))
        found["even shares"].append(max(map(len, shares)) - min(map(len, shares)) <= 1)
    return found


MY_SAMPLES = OnRanks(
    my_samples,
    [(24, 2), (11, 2), (10, 3)],
    {
        "The ranks take the same samples: number the workers over all ranks.": by_worker,
        "The workers of a rank take the same samples: share the rank's out among them.": by_rank,
        "Equal chunks lose the rest: of k readers, each takes every k-th sample, from its own number on.": in_chunks,
        "The last worker has all of the rest, and the other ranks wait: deal samples out one by one.": rest_to_the_last,
    },
    on_all_readers,
)
