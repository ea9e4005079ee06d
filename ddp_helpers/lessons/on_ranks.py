"""Exercises whose answer runs on real ranks, and the trials that most of them share.

Lessons call it, in the learner's process; each answer runs on ranks that are forked from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
import torch.distributed as dist

from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.exercise import Exercise

__all__ = ["OnRanks", "call_with_own_case", "on_ranks", "sum_over_ranks"]


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on real ranks.

    trial: gives for an answer and the arguments of a case what the ranks did; it calls on_ranks.
    """

    trial: Callable

    def verdict(self, answer: Callable) -> str:
        """Judge a learner's function: right, not attempted, or what is wrong."""
        traps = {hint: self._on_ranks(trap) for hint, trap in self.traps.items()}
        judge = Exercise(self._on_ranks(self.oracle), self.cases, traps)
        return judge.verdict(self._on_ranks(answer))

    def _on_ranks(self, function: Callable) -> Callable:
        """Return the function that gives for a case what ranks do with this one."""

        @wraps(function)
        def tried(*case: object) -> object:
            return self.trial(function, *case)

        return tried


def sum_over_ranks(value: float) -> float:
    """Compute the sum of a number over the ranks; every rank calls it."""
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


def call_with_own_case(answer: Callable, *case: tuple) -> list:
    """Call an answer on as many ranks as a case has members, each with its own: a trial.

    Returns what each rank returned. The learner's process calls it.
    """
    return on_ranks(len(case), lambda: answer(*case[dist.get_rank()]))
