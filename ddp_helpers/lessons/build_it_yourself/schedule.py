"""When each stage of a pipeline computes which micro-batch, in two orders of work.

The figure of notebook 16 and its test call it.
"""

from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
UNITS = {FORWARD: 1, BACKWARD: 2}  # backward computes two gradients, of inputs and of weights


class Work(NamedTuple):
    """What a stage does with a micro-batch, and when it starts, in units of time."""

    kind: str
    micro_batch: int
    start: int

    @property
    def end(self) -> int:
        """Return when it is done."""
        return self.start + UNITS[self.kind]


def order_of_work(stage: int, stages: int, count: int, one_by_one: bool) -> list[tuple[str, int]]:
    """List what a stage does, in its order: forward or backward, and the micro-batch."""
    first = min(stages - 1 - stage, count) if one_by_one else count
    order = []
    for step in range(count + first):
        if step < count:
            order.append((FORWARD, step))
        if step >= first:
            order.append((BACKWARD, step - first))
    return order


def schedule(stages: int, count: int, one_by_one: bool) -> list[list[Work]]:
    """Compute when each stage does what, if no stage waits longer than needed."""
    waiting = [order_of_work(stage, stages, count, one_by_one) for stage in range(stages)]
    done: list[list[Work]] = [[] for _ in range(stages)]
    ends: dict[tuple[int, str, int], int] = {}  # by stage, kind and micro-batch
    while any(waiting):
        for stage in range(stages):
            if not waiting[stage]:
                continue
            kind, micro_batch = waiting[stage][0]
            needed = _needed(stage, stages, kind, micro_batch)
            if needed is not None and needed not in ends:
                continue
            free = done[stage][-1].end if done[stage] else 0
            work = Work(kind, micro_batch, max(free, ends[needed] if needed else 0))
            done[stage].append(work)
            ends[stage, kind, micro_batch] = work.end
            del waiting[stage][0]
    return done


def _needed(stage: int, stages: int, kind: str, micro_batch: int) -> tuple[int, str, int] | None:
    """Return the work of another stage that must be done before; None if there is none."""
    if kind == FORWARD:
        return (stage - 1, FORWARD, micro_batch) if stage else None
    return (stage + 1, BACKWARD, micro_batch) if stage < stages - 1 else None


def most_held(works: list[Work]) -> int:
    """Count the micro-batches that a stage holds at once, between forward and backward."""
    held = most = 0
    for work in works:
        held += 1 if work.kind == FORWARD else -1
        most = max(most, held)
    return most


def length(table: list[list[Work]]) -> int:
    """Compute how many units of time all stages together take."""
    return max(works[-1].end for works in table)


def bubble(table: list[list[Work]]) -> float:
    """Compute the share of the stages' time in which they wait."""
    busy = sum(UNITS[work.kind] for works in table for work in works)
    return 1 - busy / (length(table) * len(table))
