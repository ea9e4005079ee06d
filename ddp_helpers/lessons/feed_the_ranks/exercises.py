"""The exercises of notebook 13: equal steps, where to resume, the samples of a worker.

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


# ---- 2: where to go on in the middle of an epoch


def where_to_resume(sizes: list[int], done: int) -> tuple[int, int]:
    """Find the shard in which a reader goes on, and the samples to skip in it.

    sizes: of its shards, in the order in which it reads them; done: the samples that it had
    yielded.
    """
    for index, size in enumerate(sizes):
        if done < size:
            return index, done
        done -= size
    return len(sizes), 0


def _whole_shard_again(sizes: list[int], done: int) -> tuple[int, int]:
    """A mistake: a shard that was read to its end is opened again, and skipped whole."""
    for index, size in enumerate(sizes):
        if done <= size:
            return index, done
        done -= size
    return len(sizes), 0


def _skips_from_the_start(sizes: list[int], done: int) -> tuple[int, int]:
    """A mistake: the samples of earlier shards are skipped in this one, too."""
    index, rest = where_to_resume(sizes, done)
    return index, done if rest else 0


def _equal_shards(sizes: list[int], done: int) -> tuple[int, int]:
    """A mistake: all shards have as many samples as the first."""
    return done // sizes[0], done % sizes[0]


_WHERE_TO_RESUME = Exercise(
    where_to_resume,
    [([10, 6, 8], 13), ([10, 6, 8], 16), ([10, 6, 8], 24), ([5, 5], 0), ([4, 9, 2], 13)],
    {
        "A shard that was read to its end is done: go on at the start of the next.": (
            _whole_shard_again
        ),
        "Take off what the shards before this one had: skip only the rest.": (
            _skips_from_the_start
        ),
        "The shards need not be of equal size: take them off one by one.": _equal_shards,
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

EXERCISES = [_EQUAL_STEPS, _WHERE_TO_RESUME, _MY_SAMPLES]
