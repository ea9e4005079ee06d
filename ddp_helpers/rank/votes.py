"""Have all ranks decide together whether to stop: was any of them told to, and is every loss finite?"""

import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Slurm's warning that the time is nearly up (--signal=USR2@120); what scancel, a preemption and torchrun send.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


def ignore_signals(worker: int) -> None:
    """Have a DataLoader worker live on while its rank saves; each worker calls it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Leave(SystemExit):
    """All ranks leave after the same step: with status 75, and the same command goes on; or 2, something is wrong."""

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code, self.state = code, "preempted" if code == 75 else "failed"


class Votes:
    """The ranks' common decisions; every rank makes one, and votes after the same steps."""

    def __init__(self, timeout: float, every: int | None) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))  # CPUs talk: the GPU works on
        self.roll_call = dist.new_group(backend="gloo")  # a group that has failed cannot say who is missing
        self.told, self.every, self.steps, self.left, self.since = 0, every, 1, 1, time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: object) -> None:
        """Handle a signal: only note it, since it may come at any moment."""
        self.told = number

    def due(self) -> bool:
        """Count a step, and say whether to vote after it: about once a second, or as often as was asked for."""
        self.left -= 1
        return self.left <= 0

    def count(self, bad: Tensor) -> int:
        """Vote; returns the signal that any rank was told, or 0. All ranks leave if a loss was not finite."""
        rank, took = dist.get_rank(), max(time.monotonic() - self.since, 1e-3)
        loss, gradient = bad.tolist()
        pace = (self.steps - self.left) / took if rank == 0 else 0  # rank 0's steps a second
        ballots = torch.tensor([self.told, loss * (rank + 1), gradient, pace], dtype=torch.float64)
        dist.all_reduce(ballots, dist.ReduceOp.MAX, group=self.group)
        told, who, spoilt, pace = map(int, ballots.tolist())
        if who or spoilt:
            what = f"the loss of rank {who - 1}" if who else "a gradient"
            cure = "no weight was changed since, and nothing saved: check its data, or lower --lr"
            raise Leave(f"{what} is not finite; {cure}")
        self.steps = self.left = self.every or max(1, pace)
        self.since = time.monotonic()
        return told
