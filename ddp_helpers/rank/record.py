"""Write the record of a run: a folder that says what was asked, where it ran, and what came out.

The scripts call it around the training and after each epoch, where `args.run_dir` is set: on rank 0
alone, if there are several. `ddp_helpers.records.runs` reads it. It needs torch.
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_helpers.rank.arguments import holds_run
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import cpus_of_rank, stop


class RecordError(OSError):
    """A file of the record cannot be written: a line says so, and no traceback.

    Other OSErrors, such as a dataset's, keep theirs.
    """


def write_files(folder: Path | None, files: Mapping[str, bytes | Mapping[str, object]]) -> None:
    """Write files, by their names, whole or not at all; without a folder, none.

    A dict is written as JSON. Raises RecordError.
    """
    if not folder:
        return
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = json.dumps(content, indent=1, default=str).encode()
        try:
            write_whole(folder / name, content)
        except OSError as error:
            raise RecordError(str(error)) from error


def claim_folder(folder: Path) -> None:
    """Make the run folder's spec.json, which nobody else can make; stops where another run has."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not holds_run(folder):
            with suppress(FileExistsError):
                # O_EXCL: of two runs that start together one succeeds.
                (folder / "spec.json").touch(exist_ok=False)
                return
    except OSError as error:
        stop(f"--run-dir {folder}: {error}: choose a folder with room that you may write to")
    stop(f"--run-dir {folder} holds a run: choose a new folder")


@contextmanager
def recorded(
    args: Namespace,
    device: torch.device,
    train_set: Dataset,
    **facts: object,
) -> Iterator[None]:
    """Record in args.run_dir what was asked, where it ran, and how what runs inside has ended.

    facts: more of where it runs, by any name. Without args.run_dir nothing is written.
    """
    if device.type == "cuda":
        chip: object = torch.cuda.get_device_name(device)
    else:
        chip = torch.cpu.get_capabilities().get("cpu_name")
    env: dict[str, object] = {"device": str(device), "chip": chip, "cpus": cpus_of_rank()}
    env |= {"torch": torch.__version__, **facts}
    env["dataset"] = getattr(train_set, "name", type(train_set).__name__)
    env["train_set"] = len(train_set) if hasattr(train_set, "__len__") else None  # a stream
    env["made_from"] = "ddp_helpers, imported"
    if args.run_dir and "resume" not in args:  # what can go on claims its folder by a lock
        claim_folder(args.run_dir)
    try:
        write_files(args.run_dir, {"spec.json": vars(args), "env.json": env})
        write_files(args.run_dir, {"status.json": {"state": "running"}})
        yield
        write_files(args.run_dir, {"status.json": {"state": "done"}})
    except BaseException as error:
        state, why = getattr(error, "state", "failed"), f"{type(error).__name__}: {error}"
        request = os.environ.get("REQUEUE_FILE")
        with suppress(OSError):
            write_files(args.run_dir, {"status.json": {"state": state, "why": why}})
            if args.run_dir and state == "preempted" and request:
                write_whole(Path(request), why.encode())  # the batch script puts the job back
        if isinstance(error, RecordError):
            folder = args.run_dir or Path()
            stop(f"--run-dir {folder}: {error}: choose a folder with room that you may write to")
        raise


def _per_sample(part: str, measured: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of a pass by its samples, and name each PART_NAME; max_ and mean_ stay."""
    samples = max(measured["samples"], 1)
    line = {}
    for name, value in measured.items():
        is_sum = name != "samples" and not name.startswith(("max_", "mean_"))
        line[f"{part}_{name}"] = value / samples if is_sum else value
    return line


def report(
    args: Namespace,
    epoch: int,
    trained: Mapping[str, float],
    tested: Mapping[str, float],
    seconds: float,
    test_seconds: float,
) -> None:
    """Print an epoch's score, and add its line to metrics.jsonl.

    trained, tested: what the two passes measured, over all samples. Raises RecordError.
    """
    line = {"epoch": epoch, **_per_sample("train", trained), **_per_sample("test", tested)}
    rate = trained["samples"] / seconds
    line |= {"seconds": seconds, "images_per_second": rate}
    line |= {"data_seconds": line.pop("train_mean_data_seconds"), "test_seconds": test_seconds}
    del line["test_mean_data_seconds"]
    score = f"test loss {line['test_loss']:.4f}"
    if "accuracy" in tested:
        score = f"{tested['accuracy']:.0f}/{tested['samples']:.0f} right"
    print(f"epoch {epoch}: {score}, {rate:,.0f} images/s", flush=True)
    if args.run_dir:
        path = args.run_dir / "metrics.jsonl"
        lines = path.read_bytes() if path.exists() else b""
        write_files(args.run_dir, {path.name: lines + json.dumps(line).encode() + b"\n"})


def save_model(model: nn.Module, folder: Path | None) -> None:
    """Write the weights to mnist_cnn.pt in the run folder, or else here. Raises RecordError."""
    folder = folder or Path()
    content = BytesIO()
    torch.save(model.state_dict(), content)
    write_files(folder, {"mnist_cnn.pt": content.getvalue()})
    print(f"saved {folder}/mnist_cnn.pt", flush=True)
