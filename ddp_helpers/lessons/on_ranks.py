"""Call a learner's function on real ranks, forked from the learner's process, and judge what they did."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.exercise import Exercise

__all__ = ["OnRanks", "each_its_own", "on_ranks", "summed"]


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on real ranks: `trial` says for an answer and a case what they did."""

    trial: Callable

    def verdict(self, answer: Callable) -> str:
        """One line about a learner's function: right, not attempted, or what its ranks do and why that is not it."""
        oracle, tried = partial(self.trial, self.oracle), partial(self.trial, answer)
        oracle.__name__ = self.oracle.__name__
        traps = {told: partial(self.trial, trap) for told, trap in self.traps.items()}
        return Exercise(oracle, self.cases, traps).verdict(tried)


def summed(value: float) -> float:
    """Compute the sum of a number over the ranks; every rank calls it."""
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


def each_its_own(answer: Callable, *case: tuple) -> list:
    """Call an answer on as many ranks as a case has members, each with its own: a trial for OnRanks."""
    return on_ranks(len(case), lambda: answer(*case[dist.get_rank()]))
