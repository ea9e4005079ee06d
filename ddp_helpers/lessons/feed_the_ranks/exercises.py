"""The exercises of notebook 13: equal steps, a shuffle buffer, the samples of a worker.

`lessons.check` asks them for verdicts, in the learner's process; the answer of the third runs on
real ranks, which are forked from it.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks

# ---- 1: as many steps on each rank


def equal_steps(readers: list[int], batch: int) -> tuple[int, int]:
    """Count the steps that all ranks can take, and the samples that are then left out."""
    steps = min(readers) // batch
    return steps, sum(readers) - len(readers) * steps * batch


def _steps_of_the_mean(readers: list[int], batch: int) -> tuple[int, int]:
    """A mistake: the ranks share what they have, as a sampler would let them."""
    steps = sum(readers) // (len(readers) * batch)
    return steps, sum(readers) - len(readers) * steps * batch


def _last_batch_is_short(readers: list[int], batch: int) -> tuple[int, int]:
    """A mistake: a step with fewer samples counts."""
    return -(-min(readers) // batch), sum(readers) - len(readers) * min(readers)


def _left_out_of_others(readers: list[int], batch: int) -> tuple[int, int]:
    """A mistake: the rest of the shortest rank is not counted."""
    steps = min(readers) // batch
    return steps, sum(size - min(readers) for size in readers)


_EQUAL_STEPS = Exercise(
    equal_steps,
    [([70, 100, 64], 32), ([40, 90], 20), ([31, 63, 95], 32)],
    {
        "A stream cannot hand samples on: the rank with the fewest decides.": _steps_of_the_mean,
        "Only whole steps count: the batch that is left over at the end is shorter.": (
            _last_batch_is_short
        ),
        "The rank with the fewest samples leaves some out, too, if its last batch is not full.": (
            _left_out_of_others
        ),
    },
)


# ---- 2: the order out of a shuffle buffer


def through_buffer(samples: list, size: int, picks: list[int]) -> list:
    """List samples in the order in which they leave a shuffle buffer.

    size: of the buffer; picks: the places that leave, one for each sample beyond the first `size`.
    """
    buffer, left = list(samples[:size]), []
    for sample, place in zip(samples[size:], picks, strict=True):
        left.append(buffer[place])
        buffer[place] = sample
    return left + buffer


def _buffer_is_dropped(samples: list, size: int, picks: list[int]) -> list:
    """A mistake: what is in the buffer at the end never leaves it."""
    return through_buffer(samples, size, picks)[: len(picks)]


def _new_before_old(samples: list, size: int, picks: list[int]) -> list:
    """A mistake: the new sample is put into its place first, and leaves at once."""
    return list(samples[size:]) + list(samples[:size])


def _moves_up(samples: list, size: int, picks: list[int]) -> list:
    """A mistake: the others move up, and the new sample comes to the end of the buffer."""
    buffer, left = list(samples[:size]), []
    for sample, place in zip(samples[size:], picks, strict=True):
        left.append(buffer.pop(place))
        buffer.append(sample)
    return left + buffer


_THROUGH_BUFFER = Exercise(
    through_buffer,
    [(list("abcdefg"), 3, [1, 0, 2, 0]), (list(range(6)), 2, [0, 0, 1, 1]), ([1, 2], 2, [])],
    {
        "Samples are missing: at the end the rest of the buffer leaves, too.": _buffer_is_dropped,
        "The sample that was in the buffer leaves; the new one stays in its place.": (
            _new_before_old
        ),
        "The new sample takes the place of the one that left, and the others stay.": _moves_up,
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

EXERCISES = [_EQUAL_STEPS, _THROUGH_BUFFER, _MY_SAMPLES]
