"""One attempt at a run that may take several: go on where the last one stopped, save, and stop together."""

import json
import time
from argparse import Namespace
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_helpers.rank.checkpoint import save
from ddp_helpers.rank.data import Batches
from ddp_helpers.rank.lost import brief
from ddp_helpers.rank.replicas import check_replicas
from ddp_helpers.rank.resume import Progress, Rest, choose, random_state, set_random_state, setting
from ddp_helpers.rank.topology import Topology, stop
from ddp_helpers.rank.votes import Preempted, Votes


class Attempt:
    """Where to start, when to save, when to stop; every rank makes one after DDP has wrapped the model.

    It loads the checkpoint that --resume asks for. Stops on all ranks, with one line, if that is of another run.
    """

    def __init__(
        self,
        args: Namespace,
        me: Topology,
        device: torch.device,
        dataset: str,
        ddp_model: DDP,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        sampler: Rest,
    ) -> None:
        self.me, self.device, self.sampler, self.every = me, device, sampler, args.checkpoint_every
        self.parts = {"model": ddp_model.module, "optimizer": optimizer, "scheduler": scheduler}
        self.settle(ddp_model)
        self.votes = Votes(ddp_model, optimizer, args.timeout)
        self.folder = args.run_dir / "checkpoints"
        self.needed, self.exact = setting(args, me, device, sampler.whole.dataset)
        self.inexact: set[str] = set()  # in what any resume of this run so far was not the uninterrupted one
        self.tries = args.dry_run
        self.progress, self.line = Progress(), "starts from the beginning"
        # A second attempt goes on from the first one's checkpoints, also where that one began from a named one.
        self.goes_on = args.resume != "never" and (args.run_dir / "attempts.jsonl").exists()
        if state := choose(args.resume, self.goes_on, self.folder):
            self.restore(state)
        check_replicas(ddp_model.module, "at the start")

    def settle(self, ddp_model: DDP) -> None:
        """Have DDP sort its buckets before step 1, in every attempt; every rank calls it.

        It does so once, after its first backward. From then on the ranks' gradients are added up in another order, and
        rounded otherwise: with three ranks or more, a resumed run would differ in its first step.
        """
        before = random_state(self.device)
        ddp_model(torch.zeros(1, 1, 28, 28, device=self.device)).sum().backward()
        ddp_model.zero_grad()
        set_random_state(before, self.device)

    def restore(self, state: dict) -> None:
        """Put all parts back as they were; every rank calls it."""
        try:
            for name, value in self.needed.items():
                if state["needed"][name] != value:
                    stop(f"the checkpoint is of a run with {name} {state['needed'][name]}, not {value}: change it back")
            self.progress = Progress(**state["progress"])
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            other = {name for name, value in self.exact.items() if state["exact"][name] != value}
            self.inexact = {*state["inexact"], *other}
            if not {"world_size", "device"} & other:
                set_random_state(state["random"][self.me.rank], self.device)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            stop(f"the checkpoint is of another script or model ({brief(error)}): take another --run-dir")
        self.sampler.done, left = divmod(self.progress.samples, self.me.world_size)
        if left:
            stop(f"{self.me.world_size} ranks cannot share {self.progress.samples} samples: take another number")
        self.line = f"goes on in epoch {self.progress.epoch} after step {self.progress.step}, {self.how(state)}"

    def how(self, state: dict) -> str:
        """What this resume is worth."""
        was, now = (one["batch_size"] * one["world_size"] for one in (state["exact"], self.exact))
        if was != now:
            return f"as another run: the global batch was {was}, and is {now}"
        if self.inexact:
            return f"close to, not equal to, the uninterrupted run: other {', '.join(sorted(self.inexact))}"
        kernels = ", as far as the GPU's kernels repeat their sums" if self.device.type == "cuda" else ""
        return f"to the bit what the uninterrupted run does{kernels}"

    @property
    def earlier(self) -> Tensor:
        """[loss, correct, samples] that earlier attempts have of this epoch, on rank 0; zeros on the others."""
        return torch.tensor(self.progress.sums, dtype=torch.float64, device=self.device) * (self.me.rank == 0)

    def stepped(self, batches: Batches) -> None:
        """Count a step; save if it is time to, and leave if any rank was told to. Every rank calls it after each."""
        now, total = self.progress, len(self.sampler.whole) * self.me.world_size
        now.step, now.samples = now.step + 1, min(total, now.samples + batches.size * self.me.world_size)
        if now.samples == total:
            return  # the end of the epoch has a checkpoint of its own
        if self.votes.stop or now.step % (self.every or now.step + 1) == 0:
            check_replicas(self.parts["model"], f"after step {now.step}")  # what is kept is the same everywhere
            took = now.took + time.perf_counter() - batches.begin
            self.save(replace(now, took=took, waited=now.waited + batches.waited), batches.sums)
        if self.votes.stop:
            raise Preempted(self.votes.stop, now.step)

    def epoch_done(self, epoch: int, last: bool) -> None:
        """Compare the replicas, save, and leave if any rank was told to, except after the last. Every rank calls it."""
        digest = check_replicas(self.parts["model"], f"after epoch {epoch}")
        self.progress, self.sampler.done = Progress(epoch + 1, step=self.progress.step), 0
        self.note("epoch", epoch=epoch, weights=digest)
        self.save(self.progress, torch.zeros(3))
        self.votes.count()
        if self.votes.stop and not last:
            raise Preempted(self.votes.stop, self.progress.step)

    def save(self, progress: Progress, sums: Tensor) -> None:
        """Write a checkpoint; every rank calls it, rank 0 writes. Stops on all ranks if it cannot be written."""
        if self.tries:
            return  # a dry run leaves nothing that a real one could go on from
        mine, trouble = (random_state(self.device), sums.tolist()), [""]
        everyones = [mine] * self.me.world_size if self.me.rank == 0 else None
        dist.gather_object(mine, everyones, group=self.votes.group)
        if self.me.rank == 0:
            totals = torch.tensor([progress.sums, *(sums for _, sums in everyones)], dtype=torch.float64).sum(dim=0)
            state = {"progress": asdict(replace(progress, sums=totals.tolist())), "random": [r for r, _ in everyones]}
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            setting = {"needed": self.needed, "exact": self.exact, "inexact": sorted(self.inexact)}
            try:
                path = save(self.folder, progress.step, state | setting)
                self.note("saved", checkpoint=path.name)
            except OSError as error:
                where = f"no checkpoint of step {progress.step} in {self.folder} ({error.strerror})"
                trouble = [f"{where}; the one before is whole: make room there, and start again"]
        dist.broadcast_object_list(trouble, group=self.votes.group)
        if trouble[0]:
            stop(trouble[0])

    def note(self, event: str, **more: Any) -> None:
        """Add a line to attempts.jsonl: what happened, when and at which step; any rank may call it, rank 0 writes."""
        if self.me.rank == 0:
            line = {"time": round(time.time(), 3), "event": event, "step": self.progress.step, **more}
            with (self.folder.parent / "attempts.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
