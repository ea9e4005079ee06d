"""Exercises of 12 and 12b: exposed time, when compression pays, late ranks, the most ranks.

`lessons.check` asks them for verdicts, in the driver process.
"""

import math

from ddp_helpers.lessons.exercise import Exercise

_Spans = list[tuple[int, int]]  # (begin, end) in ms

# ---- 1: the all-reduces that no computation hides


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


def _all_of_it(compute: _Spans, all_reduce: _Spans) -> int:
    """A mistake: hidden all-reduces count as well."""
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
        "A difference of sums ignores when each runs: "
        "an all-reduce after the computing is not hidden by it.": _difference_of_lengths,
        "If two all-reduces run at once, that time counts once.": _overlaps_twice,
        "That counts every all-reduce: subtract the time in which the rank computes.": _all_of_it,
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
    """Compute the bytes that each rank sends in an all-reduce of `size` bytes."""
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


_PAYS_BELOW = Exercise(
    pays_below,
    [(4_800_000, 2.0, 0.002, 2), (100_000_000, 64.0, 0.010, 8), (4_800_000, 10.0, 0.004, 1)],
    {
        "The compressed bytes must also be sent: only the rest, 1 - 1/factor of them, is saved.": (
            _sends_nothing_compressed
        ),
        "That counts the bytes that are still sent; count those that are saved.": (
            _counts_compressed
        ),
        "In a ring each rank sends 2(n - 1)/n times the gradients, not once.": _sends_once,
    },
)


# ---- 3: the parts of an all-reduce's time


def late_and_exchange(joined: list[int], end: int) -> list[tuple[int, int]]:
    """Split each rank's time in an all-reduce: its wait for the last rank, and the exchange."""
    last = max(joined)
    return [(last - begin, end - last) for begin in joined]


def _all_is_exchange(joined: list[int], end: int) -> list[tuple[int, int]]:
    """A mistake: no rank waits."""
    return [(0, end - begin) for begin in joined]


def _from_the_first(joined: list[int], end: int) -> list[tuple[int, int]]:
    """A mistake: the time since the first rank joined is a wait, for the late rank itself."""
    return [(begin - min(joined), end - begin) for begin in joined]


def _all_is_waiting(joined: list[int], end: int) -> list[tuple[int, int]]:
    """A mistake: the exchange is also a wait."""
    return [(end - begin, end - max(joined)) for begin in joined]


_LATE_AND_EXCHANGE = Exercise(
    late_and_exchange,
    [([3, 10], 14), ([5, 5, 5], 9), ([8, 2, 7], 8)],
    {
        "Before the last rank has joined, nothing can be exchanged: "
        "until then the others wait.": _all_is_exchange,
        "The late rank waits for no other. "
        "Count for each rank from its own start to the last one's.": _from_the_first,
        "The wait ends when the last rank joins; what is left is the exchange.": _all_is_waiting,
    },
)

# ---- 12b, 1: the most ranks of which an epoch has enough steps


def most_ranks(samples: int, batch: int, steps: int) -> int:
    """Return the most ranks on which an epoch still has `steps` steps, 0 if there are none.

    batch: the samples of a rank in a step.
    """
    for ranks in range(samples, 0, -1):
        if _steps_of_an_epoch(samples, batch, ranks) >= steps:
            return ranks
    return 0


def _steps_of_an_epoch(samples: int, batch: int, ranks: int) -> int:
    """Count the steps of an epoch, the last batch smaller, with shards padded to equal length."""
    return math.ceil(math.ceil(samples / ranks) / batch)


def _whole_batches(samples: int, batch: int, steps: int) -> int:
    """A mistake: all batches are full, and nothing is padded."""
    return samples // (batch * steps)


def _batch_of_all(samples: int, batch: int, steps: int) -> int:
    """A mistake: the batch is shared by all ranks, so their number does not matter."""
    return samples if math.ceil(samples / batch) >= steps else 0


def _at_least_one(samples: int, batch: int, steps: int) -> int:
    """A mistake: one rank is always enough."""
    return max(1, most_ranks(samples, batch, steps))


_MOST_RANKS = Exercise(
    most_ranks,
    [(60_000, 64, 100), (1000, 10, 4), (100, 10, 11), (1281, 32, 2), (64, 64, 1)],
    {
        "The last batch may be smaller, and is also a step: round up.": _whole_batches,
        "Each rank takes `batch` samples, so more ranks take fewer steps.": _batch_of_all,
        "If one rank takes fewer steps, the answer is 0.": _at_least_one,
    },
)

EXERCISES = [_NOT_HIDDEN, _PAYS_BELOW, _LATE_AND_EXCHANGE, _MOST_RANKS]
