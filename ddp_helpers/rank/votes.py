"""Have all ranks decide together whether to stop: was any of them told to, and is every loss finite?"""

import math
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim import Optimizer

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
        self.told, self.bad, self.every, self.pace, self.since = 0, False, every, 1, time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: object) -> None:
        """Handle a signal: only note it, since it may come at any moment."""
        self.told = number

    def guard(self, optimizer: Optimizer, *_: object) -> None:
        """Change no weight from the first gradient on that is not finite; the optimizer calls it before each step."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.bad = self.bad | ~torch.nn.utils.get_total_norm(gradients).isfinite()
        for gradient in gradients:
            gradient.masked_fill_(self.bad, 0)  # on the device: nobody waits, and the vote finds out

    def wait(self) -> None:
        """Wait until all ranks' GPUs have done their steps; every rank calls it.

        Raises RuntimeError as soon as a peer is lost.
        An all-reduce on a GPU waits for a lost peer until the time-out, and so does whoever waits for that GPU.
        """
        if not torch.cuda.is_initialized():
            return
        (event := torch.cuda.Event()).record()
        while True:
            done = torch.tensor(int(event.query()))
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self.group)
            if done:
                return
            time.sleep(0.001)

    def due(self) -> int:
        """Say how many steps to take before the next vote: about a second's, or as many as were asked for.

        On a GPU no more than five: a driver takes about a thousand kernels ahead, and then the rank waits for its GPU
        in the middle of a step, where it cannot notice that a peer is lost.
        """
        self.since = time.monotonic()
        return self.every or min(self.pace, 5 if torch.cuda.is_initialized() else self.pace)

    def count(self, loss: float, steps: int) -> int:
        """Vote; returns the signal that any rank was told, or 0. All ranks leave if a loss was not finite."""
        rank, took = dist.get_rank(), max(time.monotonic() - self.since, 1e-3)
        mine = [self.told, 0 if math.isfinite(loss) else rank + 1, bool(self.bad), 0 if rank else int(steps / took)]
        ballots = torch.tensor(mine)
        dist.all_reduce(ballots, dist.ReduceOp.MAX, group=self.group)
        told, who, spoilt, pace = ballots.tolist()
        if who or spoilt:
            what = f"the loss of rank {who - 1}" if who else "a gradient"
            cure = "no weight was changed since, and nothing saved: check its data, or lower --lr"
            raise Leave(f"{what} is not finite; {cure}")
        self.pace = max(1, pace)
        return told
