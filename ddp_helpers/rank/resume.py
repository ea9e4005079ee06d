"""Save everything that a run needs to go on as if it had never stopped, and put it back.

Checkpoint files are written whole or not at all, and named after their content; the last two are kept.
"""

import fcntl
import hashlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler, Sampler

from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.record import write
from ddp_helpers.rank.training import merged
from ddp_helpers.rank.votes import Leave


def save(folder: Path, step: int, state: dict) -> Path:
    """Write step-STEP-DIGEST.pt, named after the SHA-256 of its content, and keep the last two; one rank calls it."""
    torch.save(state, content := BytesIO())
    name = f"step-{step:08}-{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.pt"
    write(folder, {name: content.getvalue()})
    for old in (*checkpoints(folder)[2:], *folder.glob(".part-*")):  # what a killed attempt left half written
        old.unlink()
    return folder / name


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*-*.pt"), reverse=True)


def read(path: Path) -> bytes:
    """Read a checkpoint. Raises ValueError if its content is not what its name says, OSError if it cannot be read."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != path.stem.rpartition("-")[2]:
        raise ValueError(f"{path} is cut short or damaged: its content has another SHA-256 than its name says")
    return content


def newest(folder: Path) -> bytes:
    """Read the newest checkpoint that is whole; b"" if there is none. One that is not is set aside, and named."""
    for path in checkpoints(folder):
        try:
            return read(path)
        except ValueError as error:
            print(f"{error}; set aside as {path.stem}.damaged", flush=True)
            path.replace(path.with_suffix(".damaged"))
    return b""


def unpack(content: bytes) -> dict:
    """Load a checkpoint's content onto the CPU. Raises an error of pickle's if it holds more than data."""
    return torch.load(BytesIO(content), map_location="cpu", weights_only=True)


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
    parts = (p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Run:
    """A run in several attempts: how far it is, and its checkpoints. Every rank makes one; rank 0 has the folder.

    progress: the epoch, steps since the run began, and of this epoch samples and sums over all ranks, and seconds.
    """

    def __init__(self, args: Namespace, device: torch.device, group: dist.ProcessGroup) -> None:
        self.args, self.device, self.group, self.parts, self.begin = args, device, group, {}, time.perf_counter()
        self.progress = {"epoch": 1, "step": 0, "samples": 0, "sums": {}, "took": 0.0, "metrics": ""}
        self.setting = {name: vars(args)[name] for name in ("seed", "lr", "gamma", "precision")}
        self.shape = {"world_size": dist.get_world_size(), "batch_size": args.batch_size, "device": device.type}

    def log(self, event: str, **more: object) -> None:
        """Add a line to attempts.jsonl: what happened, when and after which step."""
        if self.args.run_dir:
            line = {"time": round(time.time(), 3), "event": event, "step": self.progress["step"], **more}
            try:
                os.write(self.held.fileno(), f"{json.dumps(line)}\n".encode())  # to close another would end the lock
            except OSError as error:
                error.of_record = True
                raise

    def save(self, sums: dict[str, float]) -> None:
        """Write a checkpoint; every rank calls it. All leave if their weights differ, or if it cannot be written."""
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        everyone, step = [None] * dist.get_world_size(), self.progress["step"]
        dist.all_gather_object(everyone, (random, sums, weight_digest(self.parts["model"])), group=self.group)
        random, sums, digests = zip(*everyone, strict=True)
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise Leave(f"after step {step}: rank {odd} has other weights than rank 0: find what changes them there")
        self.progress |= {"sums": merged(sums), "took": time.perf_counter() - self.begin}
        trouble = [""]
        if self.args.run_dir:
            state = {"progress": self.progress, "setting": self.setting, "shape": self.shape, "random": random}
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            try:
                self.log("saved", checkpoint=save(self.args.run_dir / "checkpoints", step, state).name)
            except OSError as error:
                trouble = [f"no checkpoint of step {step} ({error}): the one before is whole; make room, start again"]
        dist.broadcast_object_list(trouble, group=self.group)
        if trouble[0]:
            raise Leave(trouble[0])

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
            asked = f"give a file in {folder}/checkpoints, auto or never"
            cure = "choose a folder that you may write to" if resume in ("auto", "never") else asked
            return b"", f"--run-dir {folder} --resume {resume}: {error}: {cure}"

    def restore(self, **parts: object) -> str:
        """Put the parts back as a checkpoint has them, if there is one; every rank calls it. Says what it is worth."""
        self.parts, chosen = parts, [self.choose() if self.args.run_dir else None]
        dist.broadcast_object_list(chosen, group=self.group)  # one file for all ranks
        content, wrong = chosen[0]
        if wrong:
            stop(wrong)
        if not content:
            return "starts from the beginning"
        try:
            state = unpack(content)
            for name, part in parts.items():
                part.load_state_dict(state[name])
            self.progress, setting, shape, random = (state[name] for name in ("progress", "setting", "shape", "random"))
        except Exception as error:  # of many kinds: whatever it is, nothing can go on from here
            why = str(error).partition("\n")[0]
            stop(f"the checkpoint is of another script or model ({why}): take another --run-dir")
        if setting != self.setting:
            stop(f"the checkpoint is of a run with {setting}, not {self.setting}: change it back")
        if self.progress["samples"] % dist.get_world_size():
            stop(f"{dist.get_world_size()} ranks cannot share {self.progress['samples']} samples: take another number")
        how = f"goes on in epoch {self.progress['epoch']} after step {self.progress['step']}"
        if shape != self.shape:
            was, now = shape["batch_size"], self.shape["batch_size"]
            worth = "close to, not equal to, the uninterrupted run" if was == now else f"with a global batch of {now}"
            how = f"{how}, {worth}: {shape} became {self.shape}"
            self.shape["once"] = shape  # never called exact again
            return how
        cpu, cuda = random[dist.get_rank()]
        torch.set_rng_state(cpu)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda)
        worth = ", as far as this GPU's kernels are deterministic" if self.device.type == "cuda" else ""
        return f"{how}, to the bit what the uninterrupted run does{worth}"
