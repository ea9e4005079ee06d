"""Exercise of notebook 12 on traces: the time of all-reduces that no computing hides."""

from ddp_helpers.lessons.exercise import Exercise

Spans = list[tuple[int, int]]


def not_hidden(compute: Spans, all_reduce: Spans) -> int:
    """Count the milliseconds in which a rank all-reduces and computes nothing; each a list of (begin, end)."""
    sent = {ms for begin, end in all_reduce for ms in range(begin, end)}
    return len(sent - {ms for begin, end in compute for ms in range(begin, end)})


def _sum(spans: Spans) -> int:
    """Add the lengths up, overlaps twice."""
    return sum(end - begin for begin, end in spans)


EXERCISE = Exercise(
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
