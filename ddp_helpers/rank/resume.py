"""Save everything that a run needs to go on as if it had never stopped, and put it back.

The resumable script makes one `ResumableRun` on every rank; rank 0 has the folder. Checkpoint
files are written whole or not at all, and named after their content; the last two are kept.
It needs torch.
"""

import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler, Sampler

from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.record import RecordError, write_files
from ddp_helpers.rank.training import merge
from ddp_helpers.rank.votes import StopAllRanks


def _claim(file: TextIO) -> None:
    """Lock a file for as long as this process has it open; rank 0 calls it.

    No worker inherits the lock. Some file systems have none (Lustre mounted with noflock, NFS
    without its lock daemon): then one line says so. Raises BlockingIOError where another has it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        advice = "start no second attempt while this one runs"
        print(f"{file.name}: this file system has no locks: {advice}", file=sys.stderr, flush=True)


def save_checkpoint(folder: Path, step: int, state: dict[str, object]) -> Path:
    """Write step-STEP-DIGEST.pt, and remove all but the last two; one rank calls it.

    DIGEST is the SHA-256 of the content. Raises RecordError.
    """
    buffer = BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    name = f"step-{step:08}-{_digest(content)}.pt"
    write_files(folder, {name: content})
    half_written = folder.glob(".part-*")  # by a killed attempt
    for old in (*list_checkpoints(folder)[2:], *half_written):
        old.unlink()
    return folder / name


def _digest(content: bytes) -> str:
    """Give the beginning of the content's SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*-*.pt"), reverse=True)


def read_checkpoint(path: Path) -> bytes:
    """Read a checkpoint's content.

    Raises ValueError if it is not what its name says, OSError if it cannot be read.
    """
    content = path.read_bytes()
    if _digest(content) != path.stem.rpartition("-")[2]:
        raise ValueError(
            f"{path} is cut short or damaged: its content has another SHA-256 than its name says"
        )
    return content


def read_newest_checkpoint(folder: Path) -> bytes:
    """Read the newest checkpoint that is whole; b"" if there is none.

    One that is not whole is set aside, and named in a line.
    """
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            print(f"{error}; set aside as {path.stem}.damaged", flush=True)
            path.replace(path.with_suffix(".damaged"))
    return b""


def load_checkpoint(content: bytes) -> dict[str, Any]:
    """Load a checkpoint's content onto the CPU.

    Raises an error of pickle's if it holds more than data.
    """
    return torch.load(BytesIO(content), map_location="cpu", weights_only=True)


class RemainingSampler(Sampler[int]):
    """Yield the rest of a sampler's epoch: its first `done` samples were trained on before."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler, self.done = sampler, 0

    def set_epoch(self, epoch: int, samples: int) -> None:
        """Take the order of this epoch, of which all ranks together have done so many samples."""
        self.sampler.set_epoch(epoch)
        self.done = samples // self.sampler.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.sampler)[self.done :])

    def __len__(self) -> int:
        return len(self.sampler) - self.done


def weight_digest(model: nn.Module) -> str:
    """Compute the SHA-256 of all parameters.

    Buffers are left out: BatchNorm's differ between ranks until the next step.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


RandomStates = tuple[Tensor, Tensor | None]  # of a rank's CPU and GPU


def _random_states(device: torch.device) -> RandomStates:
    """Read the states of this rank's random number generators."""
    on_gpu = device.type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None


@dataclass
class Progress:
    """How far a run is; of the epoch that it is in, samples and sums are those of all ranks."""

    epoch: int = 1
    step: int = 0  # since the run began
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    took: float = 0.0  # seconds of the epoch
    metrics: str = ""  # what metrics.jsonl holds


class ResumableRun:
    """A run in several attempts: how far it is, and its checkpoints.

    Every rank makes one; only that of rank 0 has args.run_dir, and writes.
    """

    lock: TextIO  # rank 0's attempts.jsonl, locked as long as the attempt lasts

    def __init__(
        self,
        args: Namespace,
        device: torch.device,
        group: dist.ProcessGroup,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
    ) -> None:
        """Take the parts whose states are saved. group: that in which the ranks' CPUs talk."""
        self.args, self.device, self.group = args, device, group
        self.model, self.scheduler = model, scheduler
        self.parts: dict[str, nn.Module | Optimizer | LRScheduler] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
        }
        self.progress = Progress()
        self.begin = time.perf_counter()  # of the epoch, less the time between attempts
        # A checkpoint of another setting is refused; one of another shape is not exact.
        self.setting = {name: vars(args)[name] for name in ("seed", "lr", "gamma", "precision")}
        self.shape: dict[str, object] = {
            "world_size": dist.get_world_size(),
            "batch_size": args.batch_size,
            "device": device.type,
        }

    def log(self, event: str, **facts: object) -> None:
        """Add a line to attempts.jsonl: what happened, when, and after which step.

        Every rank calls it, and rank 0 writes. Raises RecordError.
        """
        if not self.args.run_dir:
            return
        line = {"time": round(time.time(), 3), "event": event, "step": self.progress.step, **facts}
        try:
            # By the file that is open: to close another one would end the lock.
            os.write(self.lock.fileno(), f"{json.dumps(line)}\n".encode())
        except OSError as error:
            raise RecordError(str(error)) from error

    def save(self, sums: dict[str, float]) -> None:
        """Write a checkpoint; every rank calls it. sums: what this rank has measured in the epoch.

        Raises StopAllRanks, on all ranks, if their weights differ or it cannot be written.
        """
        contribution = _random_states(self.device), sums, weight_digest(self.model)
        gathered = [contribution] * dist.get_world_size()
        dist.all_gather_object(gathered, contribution, group=self.group)
        random_states, rank_sums, digests = zip(*gathered, strict=True)
        if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise StopAllRanks(
                f"after step {self.progress.step}: rank {differing} "
                "has other weights than rank 0: find what changes them there"
            )
        self.progress.sums = merge(rank_sums)
        self.progress.took = time.perf_counter() - self.begin
        problem = [self._write(random_states)]
        dist.broadcast_object_list(problem, group=self.group)
        if problem[0]:
            raise StopAllRanks(problem[0])

    def _write(self, random_states: tuple[RandomStates, ...]) -> str:
        """Write a checkpoint, on rank 0; returns what went wrong, "" if nothing did."""
        if not self.args.run_dir:
            return ""
        step = self.progress.step
        state: dict[str, object] = {"progress": asdict(self.progress), "random": random_states}
        state |= {"setting": self.setting, "shape": self.shape}
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        try:
            path = save_checkpoint(self.args.run_dir / "checkpoints", step, state)
            self.log("saved", checkpoint=path.name)
        except OSError as error:
            cure = "the one before is whole; make room, start again"
            return f"no checkpoint of step {step} ({error}): {cure}"
        return ""

    def _choose(self) -> tuple[bytes, str]:
        """Read the checkpoint to go on from, and claim the folder; rank 0 calls it.

        Returns its content, b"" to start anew, and what is wrong, "" if nothing is.
        """
        folder, resume = self.args.run_dir, self.args.resume
        attempts = folder / "attempts.jsonl"
        has_attempts = attempts.exists()
        has_other_run = (folder / "metrics.jsonl").exists() and not has_attempts
        if has_other_run or (has_attempts and resume == "never"):
            return b"", f"--run-dir {folder} cannot take a run, it holds one: choose a new folder"
        is_path = resume not in ("auto", "never")
        try:
            given = b""
            if is_path and not has_attempts:  # before anything is made
                given = read_checkpoint(Path(resume))
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = attempts.open("a")
            _claim(self.lock)
            # Now that no other attempt writes there.
            newest = b""
            if has_attempts or resume == "auto":
                newest = read_newest_checkpoint(folder / "checkpoints")
            if is_path and not (newest or given):
                given = read_checkpoint(Path(resume))
            return newest or given, ""
        except BlockingIOError:
            return b"", f"--run-dir {folder} cannot take a run: another attempt runs there"
        except (OSError, ValueError) as error:
            cure = "choose a folder that you may write to"
            if is_path:
                cure = f"give a file in {folder}/checkpoints, auto or never"
            return b"", f"--run-dir {folder} --resume {resume}: {error}: {cure}"

    def restore(self) -> str:
        """Put all parts back as a checkpoint has them, if there is one; every rank calls it.

        Returns where the run goes on, and whether that is exact.
        """
        choice = [self._choose() if self.args.run_dir else (b"", "")]
        dist.broadcast_object_list(choice, group=self.group)  # one file for all ranks
        content, problem = choice[0]
        if problem:
            stop(problem)
        if not content:
            return "starts from the beginning"
        try:
            state = load_checkpoint(content)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.progress = Progress(**state["progress"])
            setting, shape, random_states = state["setting"], state["shape"], state["random"]
        except Exception as error:  # of many kinds: whatever it is, nothing can go on from here
            why = str(error).partition("\n")[0]
            stop(f"the checkpoint is of another script or model ({why}): take another --run-dir")
        if setting != self.setting:
            stop(f"the checkpoint is of a run with {setting}, not {self.setting}: change it back")
        world_size, samples = dist.get_world_size(), self.progress.samples
        if samples % world_size:
            stop(f"{world_size} ranks cannot share {samples} samples: take another number")
        position = f"goes on in epoch {self.progress.epoch} after step {self.progress.step}"
        if shape != self.shape:
            return f"{position}, {self._compare(shape)}"
        cpu, cuda = random_states[dist.get_rank()]
        torch.set_rng_state(cpu)
        if self.device.type != "cuda":
            return f"{position}, to the bit what the uninterrupted run does"
        torch.cuda.set_rng_state(cuda)
        limits = "as far as this GPU's kernels are deterministic"
        return f"{position}, to the bit what the uninterrupted run does, {limits}"

    def _compare(self, shape: dict[str, object]) -> str:
        """Say what a run is worth that went on in another shape; it is never called exact again."""
        batch_size = self.shape["batch_size"]
        worth = f"with a global batch of {batch_size}"
        if shape["batch_size"] == batch_size:
            worth = "close to, not equal to, the uninterrupted run"
        comparison = f"{worth}: {shape} became {self.shape}"
        self.shape["once"] = shape
        return comparison
