"""Have all ranks decide together whether to stop: was any of them told to, is every loss finite?

The resumable script makes one `Votes` on every rank, and votes after the same steps.
It needs torch.
"""

import math
import signal
import time
from datetime import timedelta
from types import FrameType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

# Slurm's warning that the time is nearly up (--signal=USR2@120); what scancel, a preemption and
# torchrun send.
_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)

# A driver takes about a thousand kernels ahead. Then the rank waits for its GPU in the middle of a
# step, where it cannot notice that a peer is lost: so a vote comes earlier.
_STEPS_AHEAD = 5


def ignore_signals(*_: object) -> None:
    """Ignore the signals: a DataLoader's workers, while their rank saves; a rank that is done."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopAllRanks(SystemExit):
    """All ranks leave after the same step.

    code 75: all is saved, and the same command goes on; 2: something is wrong.
    """

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code
        self.state = "preempted" if code == 75 else "failed"


class Votes:
    """The ranks' common decisions; every rank makes one, and votes after the same steps."""

    def __init__(self, timeout: float, every: int | None) -> None:
        """Make the groups in which the CPUs talk; the GPUs work on.

        timeout: seconds to wait for a rank. every: steps between votes, else about a second's.
        """
        self.group = _group_of_cpus(timedelta(seconds=timeout))
        self.roll_call = _group_of_cpus()  # a group that has failed cannot say who is missing
        self.every, self.pace = every, 1  # pace: steps a second
        self.begin = time.monotonic()  # of the steps since the last vote
        self.signal_number = 0
        self.spoilt: bool | Tensor = False  # whether a gradient was not finite
        for number in _SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: only note it, since it may come at any moment."""
        self.signal_number = number

    def guard(self, optimizer: Optimizer, *_: object) -> None:
        """Change no weight from the first gradient on that is not finite.

        The optimizer calls it before each step. Nobody waits for the GPU: the vote finds out.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        self.spoilt = spoilt = self.spoilt | ~is_finite
        for gradient in gradients:
            gradient.masked_fill_(spoilt, 0)

    def wait(self) -> None:
        """Wait until all ranks' GPUs have done their steps; every rank calls it.

        Raises RuntimeError as soon as a peer is lost. An all-reduce on a GPU waits for a lost
        peer until the time-out, and so does whoever waits for that GPU.
        """
        if not torch.cuda.is_initialized():
            return
        event = torch.cuda.Event()
        event.record()
        while True:
            done = torch.tensor(int(event.query()))
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self.group)
            if done:
                return
            time.sleep(0.001)

    def steps_to_take(self) -> int:
        """Choose how many steps to take before the next vote; every rank calls it.

        As many as the flag says, else about a second's; on a GPU no more than _STEPS_AHEAD.
        """
        self.begin = time.monotonic()
        if self.every:
            return self.every
        if torch.cuda.is_initialized():
            return min(self.pace, _STEPS_AHEAD)
        return self.pace

    def vote(self, loss: float, steps: int) -> int:
        """Vote on the steps just taken; every rank calls it.

        Returns the number of the signal that any rank got, or 0.
        Raises StopAllRanks, on all ranks, if a loss or a gradient was not finite.
        """
        rank, seconds = dist.get_rank(), max(time.monotonic() - self.begin, 1e-3)
        bad_loss = 0 if math.isfinite(loss) else rank + 1
        pace = int(steps / seconds) if rank == 0 else 0
        ballot = torch.tensor([self.signal_number, bad_loss, bool(self.spoilt), pace])
        dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.group)
        signal_number, bad_loss, spoilt, pace = ballot.tolist()
        if bad_loss or spoilt:
            culprit = f"the loss of rank {bad_loss - 1}" if bad_loss else "a gradient"
            cure = "no weight was changed since, and nothing saved: check its data, or lower --lr"
            raise StopAllRanks(f"{culprit} is not finite; {cure}")
        self.pace = max(1, pace)
        return signal_number


def _group_of_cpus(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a group of all ranks over gloo; every rank calls it."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
