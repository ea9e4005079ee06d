"""The run record: a folder that says what was asked, where it ran, what came out, and how it ended."""

import json
import os
import platform
import time
from argparse import Namespace

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor

from ddp_helpers.rank.chip import chip
from ddp_helpers.rank.data import Batches
from ddp_helpers.rank.topology import Topology, stop

MADE_FROM = "ddp_helpers, imported"  # a script that was written out says here from which revision


class Record:
    """The record of one run, in args.run_dir; every rank makes and enters it, rank 0 writes and prints.

    spec.json has the flags, env.json where it runs, metrics.jsonl a line an epoch, status.json whether it is running,
    done or failed, and why. Stops if the folder cannot be written or holds another run.
    """

    def __init__(self, args: Namespace, me: Topology, device: torch.device, dataset: str) -> None:
        self.prints, self.folder = me.rank == 0, args.run_dir if me.rank == 0 else None
        trouble = ""
        try:
            if self.folder:
                self.claim()
        except OSError as error:
            trouble = f"--run-dir {self.folder} cannot take a run ({error.strerror}): choose a new, writable folder"
        mine = {"rank": me.rank, "node": me.node, "host": platform.node(), "device": str(device)}
        mine["chip"] = chip(device)
        said = [(mine, trouble)]
        if dist.is_initialized():
            said *= me.world_size
            dist.all_gather_object(said, (mine, trouble))
        if said[0][1]:
            stop(said[0][1])  # on all ranks, so that none waits for rank 0
        ranks = [rank for rank, _ in said]
        versions = {module.__name__: module.__version__ for module in (torch, torchvision)}
        versions["python"] = platform.python_version()
        run = {"launcher": me.launcher, "job_id": os.environ.get("SLURM_JOB_ID"), "world_size": me.world_size}
        run |= {"cpus_per_rank": me.cpus(), "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.write("spec", vars(args))
        self.write("env", run | {"dataset": dataset, "made_from": MADE_FROM, "versions": versions, "ranks": ranks})

    def claim(self) -> None:
        """Take a folder that holds no run yet; rank 0 calls it. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "metrics.jsonl").touch(exist_ok=False)

    def write(self, name: str, content: dict) -> None:
        """Write name.json whole or not at all: a reader never sees half a file."""
        if self.folder:
            part = self.folder / f"{name}.part"
            part.write_text(json.dumps(content, indent=1, default=str) + "\n")
            part.replace(self.folder / f"{name}.json")

    def epoch(self, epoch: int, totals: Tensor, train: Batches, test: Batches) -> None:
        """Write and print an epoch's line. totals: [loss, correct, samples] of training and of test, over all ranks."""
        (loss, right, n), (test_loss, test_right, test_n) = totals.tolist()
        line = {"epoch": epoch, "train_loss": loss / n, "train_accuracy": right / n, "test_loss": test_loss / test_n}
        line |= {"test_accuracy": test_right / test_n, "test_samples": int(test_n), "images_per_second": n / train.took}
        line |= {"train_samples": int(n), "seconds": train.took, "data_seconds": train.waited}
        line |= {"exposed_seconds": train.exposed, "test_seconds": test.took}
        if self.prints:
            score = (
                f"test loss {test_loss / test_n:.4f}, {test_right:.0f}/{test_n:.0f} right ({test_right / test_n:.2%})"
            )
            print(f"epoch {epoch}: {score}, {n / train.took:,.0f} images/s, {train.took:.1f} s", flush=True)
        if self.folder:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def __enter__(self) -> "Record":
        self.write("status", {"state": "running"})
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self.write("status", {"state": "failed", "why": f"{kind.__name__}: {error}"} if kind else {"state": "done"})
