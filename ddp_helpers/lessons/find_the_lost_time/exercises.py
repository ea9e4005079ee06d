"""Exercises of notebook 12: time that nothing hides, a bandwidth below which compression pays, samples of a worker."""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks

Spans = list[tuple[int, int]]


def not_hidden(compute: Spans, all_reduce: Spans) -> int:
    """Count the milliseconds in which a rank all-reduces and computes nothing; each a list of (begin, end)."""
    sent = {ms for begin, end in all_reduce for ms in range(begin, end)}
    return len(sent - {ms for begin, end in compute for ms in range(begin, end)})


def _sum(spans: Spans) -> int:
    """Add the lengths up, overlaps twice."""
    return sum(end - begin for begin, end in spans)


NOT_HIDDEN = Exercise(
    not_hidden,
    [
        ([(0, 40)], [(20, 30), (35, 60)]),
        ([(60, 70), (0, 40)], [(45, 55), (30, 50)]),  # in any order, and two at once
        ([(0, 10), (5, 30)], [(12, 18)]),
        ([(0, 10)], []),
    ],
    {
        "A difference of sums says nothing of when: an all-reduce after the computing is not hidden by it.": (
            lambda compute, all_reduce: max(0, _sum(all_reduce) - _sum(compute))
        ),
        "Where two all-reduces run at once, that time counts once.": (
            lambda compute, all_reduce: sum(not_hidden(compute, [one]) for one in all_reduce)
        ),
        "That is the hidden time; the rest of the all-reduces is asked for.": (
            lambda compute, all_reduce: not_hidden([], all_reduce) - not_hidden(compute, all_reduce)
        ),
        "That is all of the all-reduces: take off what runs while the rank computes.": (
            lambda compute, all_reduce: not_hidden([], all_reduce)
        ),
    },
)


def pays_below(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """Bandwidth in bytes/s below which compression is worth it; gradients in bytes, extra in seconds."""
    return 2 * (ranks - 1) / ranks * gradients * (1 - 1 / factor) / extra


PAYS_BELOW = Exercise(
    pays_below,
    [(4_800_000, 2.0, 0.002, 2), (100_000_000, 64.0, 0.010, 8), (4_800_000, 10.0, 0.004, 1)],
    {
        "The compressed bytes must be sent, too: only the rest, 1 - 1/factor of them, is saved.": (
            lambda gradients, factor, extra, ranks: 2 * (ranks - 1) / ranks * gradients / extra
        ),
        "That counts the bytes that are still sent; asked are those that are saved.": (
            lambda gradients, factor, extra, ranks: 2 * (ranks - 1) / ranks * gradients / factor / extra
        ),
        "In a ring each rank sends 2(n - 1)/n times the gradients, not once.": (
            lambda gradients, factor, extra, ranks: gradients * (1 - 1 / factor) / extra
        ),
        "Up to the sum it is (n - 1)/n; the sum must go back to all ranks, which costs as much again.": (
            lambda gradients, factor, extra, ranks: (ranks - 1) / ranks * gradients * (1 - 1 / factor) / extra
        ),
    },
)


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
    found: dict[str, list] = {"never seen": [], "seen at most": [], "not of the n": [], "even shares": []}
    for size in SIZES:
        taken = on_ranks(size, lambda: [list(answer(n, num_workers, worker)) for worker in range(num_workers)])
        shares = list(chain.from_iterable(taken))
        times = Counter(chain.from_iterable(shares))
        found["never seen"].append(len(set(range(n)) - times.keys()))
        found["seen at most"].append(max(times.values(), default=0))
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

EXERCISES = [NOT_HIDDEN, PAYS_BELOW, MY_SAMPLES]
