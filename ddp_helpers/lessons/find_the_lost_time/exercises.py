"""The exercises of notebook 12: exposed time, when compression pays, the samples of a worker.

`lessons.check` asks them for verdicts, in the learner's process; the answer of the third runs on
real ranks, which are forked from it.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks

_Spans = list[tuple[int, int]]  # (begin, end) in ms

# ---- 1: the all-reduces that no computing hides


def not_hidden(compute: _Spans, all_reduce: _Spans) -> int:
    """Count the milliseconds in which a rank all-reduces and computes nothing."""
    return len(_milliseconds(all_reduce) - _milliseconds(compute))


def _milliseconds(spans: _Spans) -> set[int]:
    """List the milliseconds that are in any of the spans."""
    return {ms for begin, end in spans for ms in range(begin, end)}


def _length(spans: _Spans) -> int:
    """Add the lengths of the spans up, overlaps twice."""
    return sum(end - begin for begin, end in spans)


def _difference_of_lengths(compute: _Spans, all_reduce: _Spans) -> int:
    """A mistake: all computing hides all-reduces, whenever it is."""
    return max(0, _length(all_reduce) - _length(compute))


def _overlaps_twice(compute: _Spans, all_reduce: _Spans) -> int:
    """A mistake: the time of two all-reduces at once counts twice."""
    return sum(not_hidden(compute, [span]) for span in all_reduce)


def _hidden(compute: _Spans, all_reduce: _Spans) -> int:
    """A mistake: the all-reduces that computing hides."""
    return not_hidden([], all_reduce) - not_hidden(compute, all_reduce)


def _all_of_it(compute: _Spans, all_reduce: _Spans) -> int:
    """A mistake: hidden all-reduces count, too."""
    return not_hidden([], all_reduce)


_NOT_HIDDEN = Exercise(
    not_hidden,
    [
        ([(0, 40)], [(20, 30), (35, 60)]),
        ([(60, 70), (0, 40)], [(45, 55), (30, 50)]),  # in any order, and two at once
        ([(0, 10), (5, 30)], [(12, 18)]),
        ([(0, 10)], []),
    ],
    {
        "A difference of sums says nothing of when: "
        "an all-reduce after the computing is not hidden by it.": _difference_of_lengths,
        "Where two all-reduces run at once, that time counts once.": _overlaps_twice,
        "That is the hidden time; the rest of the all-reduces is asked for.": _hidden,
        "That is all of the all-reduces: take off what runs while the rank computes.": _all_of_it,
    },
)


# ---- 2: the bandwidth below which compression pays


def pays_below(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """Compute the bandwidth in bytes/s below which compression is worth it.

    gradients: in bytes; factor: by which they shrink; extra: seconds that compressing takes.
    """
    saved = gradients * (1 - 1 / factor)
    return _sent_in_a_ring(saved, ranks) / extra


def _sent_in_a_ring(size: float, ranks: int) -> float:
    """Compute the bytes that each rank sends in an all-reduce of so many bytes."""
    return 2 * (ranks - 1) / ranks * size


def _sends_nothing_compressed(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """A mistake: compression saves all bytes."""
    return _sent_in_a_ring(gradients, ranks) / extra


def _counts_compressed(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """A mistake: the bytes that are still sent."""
    return _sent_in_a_ring(gradients / factor, ranks) / extra


def _sends_once(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """A mistake: each rank sends its gradients once."""
    return gradients * (1 - 1 / factor) / extra


def _sends_no_sum(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """A mistake: half of the ring, up to the sum."""
    return pays_below(gradients, factor, extra, ranks) / 2


_PAYS_BELOW = Exercise(
    pays_below,
    [(4_800_000, 2.0, 0.002, 2), (100_000_000, 64.0, 0.010, 8), (4_800_000, 10.0, 0.004, 1)],
    {
        "The compressed bytes must be sent, too: only the rest, 1 - 1/factor of them, is saved.": (
            _sends_nothing_compressed
        ),
        "That counts the bytes that are still sent; asked are those that are saved.": (
            _counts_compressed
        ),
        "In a ring each rank sends 2(n - 1)/n times the gradients, not once.": _sends_once,
        "Up to the sum it is (n - 1)/n; "
        "the sum must go back to all ranks, which costs as much again.": _sends_no_sum,
    },
)


# ---- 3: the samples of a worker of a rank

_WORLD_SIZES = (2, 3)  # on which each case runs


def my_samples(n: int, num_workers: int, worker_id: int) -> list[int]:
    """List the samples, of n, that this worker of this rank takes; every worker calls it."""
    return list(range(_reader(num_workers, worker_id), n, _readers(num_workers)))


def _reader(num_workers: int, worker_id: int) -> int:
    """Number a worker of this rank over all ranks."""
    return dist.get_rank() * num_workers + worker_id


def _readers(num_workers: int) -> int:
    """Count the workers of all ranks."""
    return dist.get_world_size() * num_workers


def _by_worker(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: the ranks take the same."""
    return list(range(worker_id, n, num_workers))


def _by_rank(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: the workers of a rank take the same."""
    return list(range(dist.get_rank(), n, dist.get_world_size()))


def _in_chunks(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: nobody takes what is left over after equal chunks."""
    size = n // _readers(num_workers)
    start = _reader(num_workers, worker_id) * size
    return list(range(start, start + size))


def _rest_to_the_last(n: int, num_workers: int, worker_id: int) -> list[int]:
    """A mistake: the last reader has more than the others."""
    samples = _in_chunks(n, num_workers, worker_id)
    readers = _readers(num_workers)
    if _reader(num_workers, worker_id) == readers - 1:
        samples += range(n - n % readers, n)
    return samples


def _on_all_readers(answer: Callable, n: int, num_workers: int) -> dict[str, list]:
    """Call an answer for each worker of each rank, and count what they take: a trial.

    Returns each count for every one of _WORLD_SIZES. The learner's process calls it.
    """

    def samples_of_workers() -> list[list[int]]:
        return [list(answer(n, num_workers, worker)) for worker in range(num_workers)]

    counts: dict[str, list] = {
        "never seen": [],
        "seen at most": [],
        "not of the n": [],
        "even shares": [],
    }
    for world_size in _WORLD_SIZES:
        shares = list(chain.from_iterable(on_ranks(world_size, samples_of_workers)))
        times = Counter(chain.from_iterable(shares))
        sizes = [len(share) for share in shares]
        counts["never seen"].append(len(set(range(n)) - times.keys()))
        counts["seen at most"].append(max(times.values(), default=0))
        counts["not of the n"].append(len(times.keys() - set(range(n))))
        counts["even shares"].append(max(sizes) - min(sizes) <= 1)
    return counts


_MY_SAMPLES = OnRanks(
    my_samples,
    [(24, 2), (11, 2), (10, 3)],
    {
        "The ranks take the same samples: number the workers over all ranks.": _by_worker,
        "The workers of a rank take the same samples: share the rank's out among them.": _by_rank,
        "Equal chunks lose the rest: "
        "of k readers, each takes every k-th sample, from its own number on.": _in_chunks,
        "The last worker has all of the rest, and the other ranks wait: "
        "deal samples out one by one.": _rest_to_the_last,
    },
    _on_all_readers,
)

EXERCISES = [_NOT_HIDDEN, _PAYS_BELOW, _MY_SAMPLES]
