"""Save everything that a run needs to go on as if it had never stopped, and put it back."""

import fcntl
import hashlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, Sampler

from ddp_helpers.rank.checkpoint import newest, read, save, unpack
from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.record import Record, write


class Rest(Sampler):
    """Yield the rest of a sampler's epoch: its first `done` samples were trained on before."""

    def __init__(self, whole: DistributedSampler) -> None:
        self.whole, self.done = whole, 0

    def set_epoch(self, epoch: int, samples: int) -> None:
        """Take another order for another epoch, of which all ranks together have done so many samples."""
        self.whole.set_epoch(epoch)
        self.done = samples // self.whole.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.whole)[self.done :])

    def __len__(self) -> int:
        return len(self.whole) - self.done


def weight_digest(model: nn.Module) -> str:
    """Compute the SHA-256 of all parameters; not of buffers: BatchNorm's differ between ranks until the next step."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Run:
    """A run in several attempts: how far it is, and its checkpoints. Every rank makes one, rank 0 writes.

    progress: the epoch, steps since the run began, and of this epoch samples and sums over all ranks, and seconds.
    """

    def __init__(self, args: Namespace, device: torch.device, group: dist.ProcessGroup) -> None:
        self.args, self.device, self.group, self.parts, self.begin = args, device, group, {}, time.perf_counter()
        self.progress = {"epoch": 1, "step": 0, "samples": 0, "sums": [0.0] * 4, "took": 0.0}
        self.setting = {name: vars(args)[name] for name in ("seed", "lr", "gamma", "precision")}
        self.shape = {"world_size": dist.get_world_size(), "batch_size": args.batch_size, "device": device.type}

    def log(self, event: str, **more: object) -> None:
        """Add a line to attempts.jsonl: what happened, when and after which step; rank 0 writes."""
        if dist.get_rank() == 0:
            line = {"time": round(time.time(), 3), "event": event, "step": self.progress["step"], **more}
            os.write(self.held.fileno(), f"{json.dumps(line)}\n".encode())  # to close another would end the lock

    def save(self, sums: Tensor) -> str:
        """Write a checkpoint; every rank calls it. Stops all if their weights differ, or if it cannot be written."""
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        mine = [torch.get_rng_state(), *cuda], sums.tolist(), weight_digest(self.parts["model"])
        everyone, step = [mine] * dist.get_world_size(), self.progress["step"]
        dist.all_gather_object(everyone, mine, group=self.group)
        random, counts, digests = zip(*everyone, strict=True)
        self.progress["took"] = time.perf_counter() - self.begin
        self.progress["sums"] = torch.tensor(counts, dtype=torch.float64).sum(dim=0).tolist()
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        trouble = [f"after step {step}: rank {odd} has other weights than rank 0: find what changes them there"]
        if not odd and dist.get_rank() == 0:
            state = {"progress": self.progress, "setting": self.setting, "shape": self.shape, "random": random}
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            try:
                self.log("saved", checkpoint=save(self.args.run_dir / "checkpoints", step, state).name)
                trouble = [""]
            except OSError as error:
                trouble = [f"no checkpoint of step {step} ({error}): the one before is whole; make room, start again"]
        dist.broadcast_object_list(trouble, group=self.group)
        if trouble[0]:
            stop(trouble[0])
        return digests[0]

    def choose(self) -> tuple[bytes, str]:
        """Read the checkpoint to go on from, and claim the folder; rank 0 calls it. Says what is wrong, or nothing."""
        folder, resume = self.args.run_dir, self.args.resume
        again = (folder / "attempts.jsonl").exists()
        if (resume == "never" and again) or ((folder / "metrics.jsonl").exists() and not again):
            return b"", f"--run-dir {folder} cannot take a run, it holds one: choose a new folder"
        try:
            content = newest(folder / "checkpoints") if again or resume == "auto" else b""
            content = content or (b"" if resume in ("auto", "never") else read(Path(resume)))
            folder.mkdir(parents=True, exist_ok=True)
            self.held = (folder / "attempts.jsonl").open("a")
            fcntl.lockf(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process alone: no worker inherits it
            return content, ""
        except BlockingIOError:
            return b"", f"--run-dir {folder} cannot take a run: another attempt runs there"
        except (OSError, ValueError) as error:
            return b"", f"--resume {resume}: {error}"

    def epoch_done(self, epoch: int) -> None:
        """Save the end of an epoch, from which the next begins; every rank calls it. Not in a dry run."""
        self.log("epoch", epoch=epoch, weights=weight_digest(self.parts["model"]))
        self.progress |= {"epoch": epoch + 1, "samples": 0}
        self.begin = time.perf_counter()
        if not self.args.dry_run:
            self.save(torch.zeros(4))

    def restore(self, **parts: Any) -> str:
        """Go on from a checkpoint if there is one; every rank calls it. Says what that is worth.

        parts: the model, without its wrapper, and what else has a state_dict.
        """
        self.parts = parts
        chosen = list(self.choose() if dist.get_rank() == 0 else (b"", ""))
        dist.broadcast_object_list(chosen, group=self.group)  # one file for all ranks
        if chosen[1]:
            stop(chosen[1])
        if not chosen[0]:
            return "starts from the beginning"
        try:
            state = unpack(chosen[0])
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.progress, setting, shape, random = (state[n] for n in ("progress", "setting", "shape", "random"))
        except Exception as error:  # of many kinds: whatever it is, nothing can go on from here
            why = str(error).partition("\n")[0]
            stop(f"the checkpoint is of another script or model ({why}): take another --run-dir")
        if setting != self.setting:
            stop(f"the checkpoint is of a run with {setting}, not {self.setting}: change it back")
        if self.progress["samples"] % dist.get_world_size():
            stop(f"{dist.get_world_size()} ranks cannot share {self.progress['samples']} samples: take another number")
        line = f"goes on in epoch {self.progress['epoch']} after step {self.progress['step']}"
        if shape != self.shape:
            was, now = (one["batch_size"] * one["world_size"] for one in (shape, self.shape))
            worth = "close to, not equal to, the uninterrupted run" if was == now else f"with a global batch of {now}"
            line = f"{line}, {worth}: {shape} became {self.shape}"
            self.shape["once"] = shape  # never called exact again
            return line
        torch.set_rng_state(random[dist.get_rank()][0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(random[dist.get_rank()][1], self.device)
        return f"{line}, to the bit what the uninterrupted run does"


class AttemptRecord(Record):
    """The record of a run in several attempts; every rank makes one, rank 0 writes."""

    def __init__(self, run: Run) -> None:
        super().__init__(None)
        self.run, self.folder = run, run.args.run_dir if dist.get_rank() == 0 else None

    def go_on(self, how: str, **files: dict) -> None:
        """Write files of the record, and keep the lines of the epochs that are not done again."""
        slurm = {name.lower(): os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")}
        self.run.log("started", how=how, world_size=dist.get_world_size(), **slurm)
        self.note(**files)
        print(how if self.folder else "", end="\n" if self.folder else "", flush=True)
        if self.folder and (self.folder / "metrics.jsonl").exists():
            for line in (self.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True):
                with suppress(ValueError, KeyError, TypeError):  # what is no line of ours
                    self.lines += line if json.loads(line)["epoch"] < self.run.progress["epoch"] else b""
            write(self.folder / "metrics.jsonl", self.lines)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.folder and getattr(error, "state", ""):
            print(error, flush=True)
        with suppress(OSError):
            self.run.log(getattr(error, "state", "failed") if error else "done", why=str(error or ""))
        try:
            super().__exit__(kind, error, trace)
        finally:
            if kind is None or getattr(error, "state", ""):
                dist.barrier(group=self.run.group)  # srun ends all ranks when one has left: rank 0 has written first
