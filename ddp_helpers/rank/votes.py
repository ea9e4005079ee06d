"""Before each optimizer step all ranks vote: is every loss finite, and was anyone told to stop?"""

import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_helpers.rank.topology import stop

# Slurm's warning that the time is nearly up (--signal=USR2@120), and the request to end that scancel, a preemption and
# torchrun send.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


AGAIN = 75  # the exit status of a run that is saved and wants to go on, EX_TEMPFAIL of sysexits.h


class Preempted(SystemExit):
    """Leave, all ranks at the same step: the state is saved, and another attempt will go on."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(AGAIN)
        self.number, self.why = number, f"stopped by {signal.Signals(number).name} after step {step}, and saved"

    def __str__(self) -> str:
        return self.why


class Votes:
    """The ranks' common decisions; every rank makes one after DDP has wrapped the model.

    `stop` is the signal that any rank has received, 0 if none has: the same on all ranks at the same step.
    """

    def __init__(self, ddp_model: nn.Module, optimizer: Optimizer, seconds: float) -> None:
        self.received = self.stop = 0
        self.output = torch.zeros(())
        # On CPUs with gloo, where a dead rank is noticed at once.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self.parameters = [parameter for parameter in ddp_model.parameters() if parameter.requires_grad]
        for number in SIGNALS:
            signal.signal(number, self.receive)
        ddp_model.register_forward_hook(self.look)
        optimizer.register_step_pre_hook(self.before_step)

    def receive(self, number: int, _: object) -> None:
        """The handler: no more than a note, since a signal comes at any moment."""
        self.received = self.received or number

    def look(self, model: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Keep what the model said last."""
        self.output = output.detach()

    @torch.compiler.disable
    def before_step(self, *_: object) -> None:
        """Vote; every rank calls it. Stops on all ranks if a loss is not finite, before any weight has changed."""
        if self.output.is_cuda:
            dist.barrier(
                group=self.group
            )  # the next line waits for the GPU, and so for NCCL, which notices nobody's end
        bad = not self.output.isfinite().all()
        gradients = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        _, rank, spoilt = self.count(dist.get_rank() + 1 if bad else 0, int(not gradients.isfinite()))
        if rank or spoilt:
            who = f"the loss of rank {rank - 1}" if rank else "a gradient"
            stop(f"{who} is not finite; no weight was changed, and all ranks stop: check its data, or lower --lr")

    def count(self, *more: int) -> list[int]:
        """The highest ballot of any rank: the signal, and what else is asked; every rank calls it."""
        ballots = torch.tensor([self.received, *more])
        dist.all_reduce(ballots, dist.ReduceOp.MAX, group=self.group)
        self.stop = int(ballots[0])
        return ballots.tolist()
