"""Exercises of notebook 10."""

from itertools import zip_longest

from ddp_helpers.lessons.exercise import Exercise

RESET = "Connection reset by peer"


def to_blame(complaints: list[tuple[float, int, str]]) -> int:
    """The rank to look at first, from (seconds, rank, message) of each complaint."""
    return min(complaints)[1]


def killed_by(status: int) -> int:
    """The number of the signal that ended a process, from Python's status or a shell's; 0 if none did."""
    if status < 0:
        return -status
    return status - 128 if status > 128 else 0


def where_they_part(calls: list[list[str]]) -> int | None:
    """The first call, counted from 0, in which not all ranks enter the same collective; None if all agree."""
    for number, names in enumerate(zip_longest(*calls)):
        if len(set(names)) > 1:
            return number
    return None


def stop_step(told_at: list[int], every: int) -> int:
    """The step at which all stop, if they vote at the steps 0, every, 2 * every, …"""
    return -(-min(told_at) // every) * every


def parted(calls: list[list[str]]) -> int | None:
    """As far as the shortest list goes."""
    return next((number for number, names in enumerate(zip(*calls, strict=False)) if len(set(names)) > 1), None)


EXERCISES = [
    Exercise(
        to_blame,
        [
            ([(3.1, 0, RESET), (3.0, 2, "loss is nan"), (3.2, 1, RESET)],),
            ([(9.4, 0, RESET), (9.0, 1, "out of memory")],),
            ([(5.0, 3, "No space left on device"), (5.1, 0, RESET), (5.1, 1, RESET), (5.2, 2, RESET)],),
        ],
        {
            "The lines of a log are in no order; go by the seconds.": lambda complaints: complaints[0][1],
            "That rank complains last; the first complaint in time counts.": lambda complaints: max(complaints)[1],
            "That is the lowest rank; the number of a rank says nothing about blame.": lambda complaints: min(
                rank for _, rank, _ in complaints
            ),
        },
    ),
    Exercise(
        killed_by,
        [(137,), (-9,), (-11,), (134,), (1,), (0,)],
        {
            "Python reports a signal as a negative number; a shell adds 128 to it.": lambda status: (
                status - 128 if status > 128 else 0
            ),
            "That is how Python tells it; a shell adds 128 to the signal's number.": lambda status: max(0, -status),
            "A small status such as 1 is the program's own, and no signal.": lambda status: abs(status) % 128,
        },
    ),
    Exercise(
        where_they_part,
        [
            ([["all_reduce", "barrier"], ["all_reduce", "barrier"]],),
            ([["all_reduce"] * 6, ["all_reduce"] * 5],),
            ([["broadcast", "all_reduce"], ["broadcast", "all_reduce"], ["broadcast", "broadcast"]],),
            ([["all_reduce", "all_gather", "barrier"], ["all_gather", "all_reduce", "barrier"]],),
        ],
        {
            "A rank that has ended enters nothing: look beyond the end of the shortest list.": parted,
            "Look at all ranks, not only at the first two.": lambda calls: where_they_part(calls[:2]),
        },
    ),
    Exercise(
        stop_step,
        [([3, 4], 1), ([7, 5], 4), ([8, 9, 12], 4), ([0, 5], 3)],
        {
            "They stop at a step in which they vote: a multiple of `every`.": lambda told_at, every: min(told_at),
            "That vote came before anybody was told; take the next one.": lambda told_at, every: (
                min(told_at) // every * every
            ),
            "One vote is enough: the first rank that was told stops all.": lambda told_at, every: (
                -(-max(told_at) // every) * every
            ),
        },
    ),
]
