"""The exercises of notebook 13: equal steps, where to resume, a worker's samples.

`lessons.check` asks them for verdicts, in the driver process. The third is a trial, which
runs on every rank and has the name of its exercise.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch.distributed as dist

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison, at_most
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks

# ---- 1: the same number of steps on each rank


def equal_steps(readers: list[int], batch: int) -> tuple[int, int]:
    """Count the steps that all ranks can take, and the samples that are then left out."""
    steps = min(readers) // batch
    return steps, sum(readers) - len(readers) * steps * batch


_EQUAL_STEPS = Exercise(
    equal_steps,
    [([70, 100, 64], 32), ([40, 90], 20), ([31, 63, 95], 32)],
    {
        "A stream cannot hand samples on: the rank with the fewest sets the number.": (
            lambda readers, batch: divmod(sum(readers), len(readers) * batch)
        ),
        "Only full steps count: the batch that is left over at the end is shorter.": (
            lambda readers, batch: (
                -(-min(readers) // batch),
                sum(readers) - len(readers) * min(readers),
            )
        ),
        "The rank with the fewest samples also leaves some out if its last batch is not full.": (
            lambda readers, batch: (
                min(readers) // batch,
                sum(readers) - len(readers) * min(readers),
            )
        ),
    },
)


# ---- 2: where to resume in the middle of an epoch


def where_to_resume(sizes: list[int], done: int) -> tuple[int, int]:
    """Find the shard in which a reader resumes, and the samples to skip in it.

    sizes: of its shards, in the order in which it reads them; done: the samples that it had
    yielded.
    """
    for index, size in enumerate(sizes):
        if done < size:
            return index, done
        done -= size
    return len(sizes), 0


def _whole_shard_again(sizes: list[int], done: int) -> tuple[int, int]:
    """A mistake: a shard that was read to its end is opened again and skipped entirely."""
    index, skipped = where_to_resume(sizes, done - 1)
    return index, skipped + 1


def _skips_from_the_start(sizes: list[int], done: int) -> tuple[int, int]:
    """A mistake: the samples of earlier shards are also skipped in this one."""
    index, _ = where_to_resume(sizes, done)
    return index, done if index < len(sizes) else 0


_WHERE_TO_RESUME = Exercise(
    where_to_resume,
    [([10, 6, 8], 13), ([10, 6, 8], 16), ([10, 6, 8], 24), ([5, 5], 0), ([4, 9, 2], 13)],
    {
        "A shard that was read to its end is done: resume at the start of the next.": (
            _whole_shard_again
        ),
        "Take off what the shards before this one had: skip only the rest.": (
            _skips_from_the_start
        ),
        "The shards need not be of equal size: take them off one by one.": (
            lambda sizes, done: divmod(done, sizes[0])
        ),
    },
)


# ---- 3: the samples of a worker of a rank


def my_samples(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare what the workers of all ranks take with each sample once, in even shards."""
    rank, size, num_workers = dist.get_rank(), dist.get_world_size(), 3
    for n in (24, 11):
        mine: list[Any] = [
            answer(n, rank, size, num_workers, worker) for worker in range(num_workers)
        ]
        kinds = {type(share).__name__ for share in mine}
        yield Comparison("what it returns", kinds, {"list"})
        of_ranks: list[Any] = [[]] * size
        dist.all_gather_object(of_ranks, [list(share) for share in mine])
        shares = list(chain(*of_ranks))
        due, taken, sizes = Counter(range(n)), Counter(chain(*shares)), [*map(len, shares)]
        where = f"of {n} samples, with {num_workers} workers on each rank,"
        surplus = sorted((taken - due).elements())
        known: dict[str, object] = {
            "The ranks take the same samples: number the workers over all ranks.": (
                sorted([*range(n)] * (size - 1))
            ),
            "The workers of a rank take the same samples: divide the rank's samples among them.": (
                sorted([*range(n)] * (num_workers - 1))
            ),
        }
        yield Comparison(f"{where} samples that are taken once too often", surplus, [], known)
        missing = sorted((due - taken).elements())
        known = {_LOSES_REST: [*range(n - n % len(shares), n)]}
        yield Comparison(f"{where} samples that no worker takes", missing, [], known)
        what = f"{where} the largest shard minus the smallest"
        yield at_most(what, max(sizes) - min(sizes), 1, _REST_TO_ONE)


_LOSES_REST = "Equal chunks lose the rest: "
_LOSES_REST += "of k readers, each takes every k-th sample, from its own number on."
_REST_TO_ONE = "One worker has all of the rest, and the other ranks wait: "
_REST_TO_ONE += "assign samples one by one."

EXERCISES = [_EQUAL_STEPS, _WHERE_TO_RESUME, on_real_ranks(my_samples)]
