"""The check of the audit on time: whether one rank has the others wait for it.

`judge` calls it with the notes of all ranks, in the learner's process. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from ddp_tools.audit.notes import FAIL, OK, UNKNOWN, Finding, Notes, Step, select

_PHASES = {"loading": "its batches", "forward": "the forward pass", "own code": "its own code"}
_FEWEST = 5  # steps, whose times are compared
_LONGER = 0.05  # seconds of a step, below which nothing is said of a slow rank
_MOST = 0.75  # of the steps: where a rank is slow in fewer, the machine may have been busy


def straggler(ranks: list[Notes]) -> Finding:
    """No rank takes much longer than the others over its own part of a step."""
    seconds = [[step.seconds for step in select(notes, Step) if step.seconds] for notes in ranks]
    if len(ranks) < 2 or min(map(len, seconds)) < _FEWEST:
        return Finding(UNKNOWN, f"fewer than {_FEWEST} steps, whose times could be compared")
    # The first step has whatever came before it.
    steps = list(zip(*(steps[1:] for steps in seconds), strict=False))
    for phase, words in _PHASES.items():
        middle = [median(step[rank][phase] for step in steps) for rank in range(len(ranks))]
        slow = middle.index(max(middle))
        if sum(_is_slow(slow, phase, step) for step in steps) > _MOST * len(steps):
            others = max(value for rank, value in enumerate(middle) if rank != slow)
            took = f"{middle[slow]:.2g} s of each step for {words}, the others {others:.2g} s"
            cure = f"what does rank {slow} do there that the others do not: another file, more "
            cure += "samples, `if rank`, printing? The others wait for it in each backward pass"
            return Finding(FAIL, f"rank {slow} takes {took}", cure)
    return Finding(OK, "no rank takes half a step longer than the others for its own part")


def _is_slow(rank: int, phase: str, step: Sequence[Mapping[str, float]]) -> bool:
    """Whether a rank takes more than half a step longer than each other one in a phase of it."""
    others = max(seconds[phase] for other, seconds in enumerate(step) if other != rank)
    return step[rank][phase] - others > max(_LONGER, step[rank]["whole"] / 2)
