"""The training batches of an attempt: after the step with each, the attempt counts it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ddp_helpers.rank.attempt import Attempt
from ddp_helpers.rank.data import Batches


class Steps(Batches):
    """Batches that tell the attempt of each step; every rank makes one of its own shard."""

    def __init__(self, attempt: Attempt, *args: Any) -> None:
        super().__init__(*args)
        self.attempt = attempt

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        earlier = self.attempt.progress
        for batch in super().__iter__():
            yield batch
            self.attempt.stepped(self)
        self.took, self.waited = self.took + earlier.took, self.waited + earlier.waited
