"""Have all ranks decide together whether to stop: was any of them told to, and is every loss finite?"""

import signal
import time
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.rank.launchers import stop

# Slurm's warning that the time is nearly up (--signal=USR2@120); what scancel, a preemption and torchrun send.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


def ignore_signals(worker: int) -> None:
    """Have a DataLoader worker live on while its rank saves; each worker calls it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Preempted(SystemExit):
    """Leave, all ranks after the same step, with exit status 75: all is saved, and the same command goes on."""

    state = "preempted"

    def __init__(self, told: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(told).name} after step {step}, and saved")
        self.code = 75  # EX_TEMPFAIL of sysexits.h


class Votes:
    """The ranks' common decisions; every rank makes one, and votes after the same steps."""

    def __init__(self, timeout: float, every: int | None) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))  # CPUs talk: the GPU works on
        self.roll_call = dist.new_group(backend="gloo")  # a group that has failed cannot say who is missing
        self.told, self.every, self.steps, self.left, self.since = 0, every, 1, 1, time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: only note it, since it may come at any moment."""
        self.told = self.told or number

    def due(self) -> bool:
        """Count a step, and say whether to vote after it: about once a second, or as often as was asked for."""
        self.left -= 1
        return self.left <= 0

    def count(self, bad: Tensor) -> int:
        """Vote; returns the signal that any rank was told, or 0. Stops all ranks where a loss was not finite."""
        rank, took = dist.get_rank(), max(time.monotonic() - self.since, 1e-3)
        loss, gradient = bad.tolist()
        mine = [self.told, loss * (rank + 1), gradient, 0 if rank else int((self.steps - self.left) / took)]
        ballots = torch.tensor(mine)
        dist.all_reduce(ballots, dist.ReduceOp.MAX, group=self.group)
        told, who, spoilt, pace = ballots.tolist()
        if who or spoilt:
            what = f"the loss of rank {who - 1}" if who else "a gradient"
            stop(f"{what} is not finite; no weight was changed since, and nothing saved: check its data, or lower --lr")
        self.steps = self.left = self.every or max(1, pace)
        self.since = time.monotonic()
        return told
