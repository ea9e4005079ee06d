"""The table of the bench: a row for each goal, and measurements that take turns."""

import time
from collections.abc import Callable
from statistics import quantiles


def row(name: str, values: list[float], sign: str = "<=", goal: float | None = None) -> dict:
    """Print a row of the table: the median, the middle half of the values, the goal if there is one; return the row."""
    asked, verdict, met = "no goal", "", None
    if not values:
        print(f"{name:<55} not measured: it needs what this machine lacks", flush=True)
        return {"name": name, "median": None, "values": [], "goal": goal and f"{sign} {goal}", "met": None}
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    if goal is not None:
        met = middle <= goal if sign == "<=" else middle >= goal
        asked, verdict = f"{sign} {goal:<5g}", " met" if met else " MISSED"
    digits = 0 if middle > 100 else 3
    spread = f"{low:.{digits}f} to {high:.{digits}f}"
    print(f"{name:<55} {middle:8.{digits}f}  {spread:<16} {len(values):3}  {asked}{verdict}", flush=True)
    return {"name": name, "median": middle, "values": values, "goal": goal and f"{sign} {goal}", "met": met}


def turns(seconds: float, a: Callable[[], float], b: Callable[[], float]) -> list[tuple[float, float]]:
    """What a and b measure, taking turns, A B B A, for so many seconds and at least three times."""
    pairs, end = [], time.monotonic() + seconds
    while len(pairs) < 3 or time.monotonic() < end:
        first, second = (a, b) if len(pairs) % 2 == 0 else (b, a)
        pair = first(), second()
        pairs.append(pair if first is a else pair[::-1])
    return pairs
