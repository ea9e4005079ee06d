"""Write the record of a run: a folder that says what was asked, where it ran, what came out, and how it ended."""

import json
import os
from argparse import Namespace
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils.data import Dataset

from ddp_helpers.rank.arguments import holds_run
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import cpus_of_rank, stop


def write(folder: Path | None, files: dict[str, bytes | dict]) -> None:
    """Write files whole or not at all: each gets its name when all of it is there. No folder, no files."""
    for name, content in files.items() if folder else ():
        text = content if isinstance(content, bytes) else json.dumps(content, indent=1, default=str).encode()
        try:
            write_whole(folder / name, text)
        except OSError as error:
            error.of_record = True  # not of a dataset, whose errors keep their traceback
            raise


def claim(folder: Path) -> None:
    """Make the run folder's spec.json, which nobody else can make a second time; stops where a run has done so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not holds_run(folder):
            with suppress(FileExistsError):
                (folder / "spec.json").touch(exist_ok=False)  # O_EXCL: of two runs that start together one succeeds
                return
    except OSError as error:
        stop(f"--run-dir {folder}: {error}: choose a folder with room that you may write to")
    stop(f"--run-dir {folder} holds a run: choose a new folder")


@contextmanager
def recorded(args: Namespace, device: torch.device, train_set: Dataset, **group: object):
    """Record in args.run_dir, if there is one, what was asked, where it ran, and how what runs inside has ended."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.cpu.get_capabilities().get("cpu_name")
    env = {"device": str(device), "chip": chip, "cpus": cpus_of_rank(), "torch": torch.__version__, **group}
    length = len(train_set) if hasattr(train_set, "__len__") else None  # a stream has none
    env |= {"dataset": getattr(train_set, "name", type(train_set).__name__), "train_set": length}
    env["made_from"] = "ddp_helpers, imported"
    if args.run_dir and "resume" not in args:  # what can go on claims its folder by a lock
        claim(args.run_dir)
    try:
        write(args.run_dir, {"spec.json": vars(args), "env.json": env, "status.json": {"state": "running"}})
        yield
        write(args.run_dir, {"status.json": {"state": "done"}})
    except BaseException as error:
        status = {"state": getattr(error, "state", "failed"), "why": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            write(args.run_dir, {"status.json": status})
            if args.run_dir and status["state"] == "preempted" and os.environ.get("REQUEUE_FILE"):
                write_whole(Path(os.environ["REQUEUE_FILE"]), status["why"].encode())  # the batch script puts it back
        if hasattr(error, "of_record"):
            stop(f"--run-dir {args.run_dir or Path()}: {error}: choose a folder with room that you may write to")
        raise


def per_sample(part: str, measured: dict[str, float]) -> dict[str, float]:
    """Divide the sums of a pass by its samples, and name each train_NAME or test_NAME; max_ and mean_ stay."""
    n, line = max(measured["samples"], 1), {}
    for name, value in measured.items():
        as_is = name == "samples" or name.startswith(("max_", "mean_"))
        line[f"{part}_{name}"] = value if as_is else value / n
    return line


def report(args: Namespace, epoch: int, trained: dict, tested: dict, seconds: float, test_seconds: float) -> None:
    """Print an epoch's score, and add its line to metrics.jsonl, from what its two passes measured."""
    line = {"epoch": epoch} | per_sample("train", trained) | per_sample("test", tested)
    rate = trained["samples"] / seconds
    line |= {"seconds": seconds, "images_per_second": rate, "data_seconds": line.pop("train_mean_data_seconds")}
    line |= {"test_seconds": test_seconds}
    del line["test_mean_data_seconds"]
    score = f"test loss {line['test_loss']:.4f}"
    if "accuracy" in tested:
        score = f"{tested['accuracy']:.0f}/{tested['samples']:.0f} right"
    print(f"epoch {epoch}: {score}, {rate:,.0f} images/s", flush=True)
    if args.run_dir:
        path = args.run_dir / "metrics.jsonl"
        before = path.read_bytes() if path.exists() else b""
        write(args.run_dir, {path.name: before + json.dumps(line).encode() + b"\n"})
