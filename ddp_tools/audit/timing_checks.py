"""The audit's check of time per step: whether the other ranks wait for a slow one.

`judge` calls it with the notes of all ranks, in the driver process. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from ddp_tools.audit.notes import FAIL, OK, UNKNOWN, Finding, Notes, Step, select

_PHASES = {"loading": "its batches", "forward": "the forward pass", "own code": "its own code"}
_FEWEST = 5  # steps to compare
_LONGER = 0.05  # seconds per step: a smaller difference is not reported
_MOST = 0.75  # of the steps: if a rank is slow in fewer, the machine may have been busy


def straggler(ranks: list[Notes]) -> Finding:
    """No rank takes much longer than the others for its own part of a step."""
    seconds = [[step.seconds for step in select(notes, Step) if step.seconds] for notes in ranks]
    if len(ranks) < 2 or min(map(len, seconds)) < _FEWEST:
        return Finding(UNKNOWN, f"fewer than {_FEWEST} steps, whose times could be compared")
    # The time of the first step includes the script's start.
    steps = list(zip(*(steps[1:] for steps in seconds), strict=False))
    for phase, words in _PHASES.items():
        middle = [median(step[rank][phase] for step in steps) for rank in range(len(ranks))]
        slow = middle.index(max(middle))
        if sum(_is_slow(slow, phase, step) for step in steps) > _MOST * len(steps):
            others = max(value for rank, value in enumerate(middle) if rank != slow)
            took = f"{middle[slow]:.2g} s of each step for {words}, the others {others:.2g} s"
            cure = f"what does rank {slow} do there that the others do not: different files, more "
            cure += "samples, `if rank`, printing? The others wait for it in each backward pass"
            return Finding(FAIL, f"rank {slow} takes {took}", cure)
    return Finding(OK, "no rank takes half a step longer than the others for its own part")


def _is_slow(rank: int, phase: str, step: Sequence[Mapping[str, float]]) -> bool:
    """Whether a rank's phase takes over half a step longer than the same phase on all others."""
    others = max(seconds[phase] for other, seconds in enumerate(step) if other != rank)
    return step[rank][phase] - others > max(_LONGER, step[rank]["whole"] / 2)
