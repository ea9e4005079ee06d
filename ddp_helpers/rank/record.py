"""Write the record of a run: a folder with its settings, its machines and its results.

Your own script imports it, or has a copy of this file next to it; the course's scripts contain the
same functions. `ddp_helpers.records.runs` reads the record. It needs torch.
"""

import json
import os
from argparse import Namespace
from pathlib import Path

import torch
from torch.utils.data import Dataset


def claim(folder: Path | None) -> None:
    """Make the folder of the record, if there is one: only rank 0 has it."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").touch(exist_ok=False)  # only one of two runs gets the folder


def begin_record(args: Namespace, ranks: list[dict], train_set: Dataset) -> None:
    """Record in args.run_dir, if there is one, the settings and where the ranks run."""
    env = {"launcher": ranks[0]["launcher"], "world_size": len(ranks), "ranks": ranks}
    env |= {"job_id": os.environ.get("SLURM_JOB_ID"), "global_batch_size": args.batch_size}
    env |= {"dataset": getattr(train_set, "name", type(train_set).__name__)}
    env |= {"train_set": len(train_set), "torch": torch.__version__}
    write(args.run_dir, "spec.json", vars(args))
    write(args.run_dir, "env.json", env)
    write(args.run_dir, "status.json", {"state": "running"})


def write(folder: Path | None, name: str, content: dict) -> None:
    """Write a file of the record, if there is one: only rank 0 has its folder."""
    if folder:
        (folder / name).write_text(json.dumps(content, indent=1, default=str))


def report(folder: Path | None, epoch: int, trained: dict, tested: dict, seconds: dict) -> None:
    """Print an epoch's means over all samples, and add them to metrics.jsonl; rank 0 calls it."""
    line = {"epoch": epoch, **seconds}
    line["images_per_second"] = trained["samples"] / seconds["seconds"]
    for part, sums in {"train": trained, "test": tested}.items():
        line[f"{part}_samples"] = samples = sums["samples"]
        means = {name: total / samples for name, total in sums.items() if name != "samples"}
        line |= {f"{part}_{name}": mean for name, mean in means.items()}
    scores = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
    print(f"epoch {epoch}: test {scores}; {line['images_per_second']:,.0f} images/s", flush=True)
    if folder:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
