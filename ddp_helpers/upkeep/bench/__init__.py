"""The speed goals of the course, measured: what is compared takes turns, so that a busy machine slows both alike."""

import json
import os
import tempfile
from pathlib import Path

import torch

from ddp_helpers import ROOT
from ddp_helpers.notebook.machine import provenance
from ddp_helpers.rank.group import claim_device
from ddp_helpers.rank.staging import check_data, stage
from ddp_helpers.upkeep.bench import training
from ddp_helpers.upkeep.bench.ladder import climb, of_script, picture, say
from ddp_helpers.upkeep.bench.training import (
    cost_of_ddp,
    fast_against_plain,
    imports,
    memory,
    resumable_against_ddp,
    row,
    single,
    submit_to_step,
    two_and_one,
    two_apart,
)


def bench() -> None:
    """Measure every goal, print the tables, draw the ladder, write build/bench.json; one process, a quiet machine."""
    load, data = os.getloadavg()[0], stage(ROOT / "data")
    device, dataset = claim_device(0), check_data(data)
    record = provenance() | {"device": str(device), "dataset": dataset, "load_before": load}
    print(f"{record['machine']}; load {load:.1f} before the start: a machine that others use misses goals")
    ladder = climb(data, device)
    with tempfile.TemporaryDirectory() as name:
        fast = [single(Path(name), name="mnist_fast") for _ in range(3)]
        ladder.append(of_script("mnist_fast", fast, ladder, device))
        say(ladder[-1])
        print(f"\n{'':<55} {'median':>8}  {'middle half':<16}   n  goal", flush=True)
        rows, ranks = one_device(Path(name), data, device, ladder), several(Path(name), device, ladder)
        rows += ranks[0] + jobs(Path(name), data, dataset)
    (ROOT / "build").mkdir(exist_ok=True)
    where = f"{dataset}, batches of 64, {device.type.upper()}{'; DDP: a thread each' if ranks[1] else ''}"
    picture(ladder + ranks[1], where, ROOT / "build" / "bench.png")
    record |= {"ladder": ladder, "ranks": ranks[1], "rows": rows}
    (ROOT / "build" / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json and build/bench.png")


def one_device(folder: Path, data: Path, device: torch.device, ladder: list[dict]) -> list[dict]:
    """The goals of one process; on a GPU also those of all of MNIST."""
    gpu, shares = device.type == "cuda", [rung["share_of_limit"] for rung in ladder if rung["precision"] == "bf16"]
    rows = [
        row("import the helpers after torch and torchvision: s", imports(), "<=", 0.3),
        row("best rung's share of the bf16 matrix rate", [max(shares)] if shares else [], ">=", 0.4),
        row("mnist_fast / PyTorch's example: images/s", fast_against_plain(folder), ">=", 50 if gpu else 4),
        row("the same, batch 256: images/s", fast_against_plain(folder, "--batch-size", "256", "--lr", "2"), ">=", 4),
        row("DDP with one rank, slower than without: %", cost_of_ddp(data, device), "<=", 3),
    ]
    if gpu:
        lines = training.epochs(folder, data, 14)
        rows.append(row("an epoch, batch 64: s", [line["seconds"] for line in lines[1:]], "<=", 0.15))
        rows.append(row("training until 99 % of the test are right: s", training.seconds_to(lines, 0.99), "<=", 1))
    return rows


def several(folder: Path, device: torch.device, ladder: list[dict]) -> tuple[list[dict], list[dict]]:
    """The goals of two ranks against one, and the rows that belong beside the ladder."""
    rows, beside = [], []
    for batch, goal in ((64, 1.5), (256, 1.9)):
        twos, ones = map(list, zip(*two_and_one(folder, batch), strict=True))
        ratios = [two / one for two, one in zip(twos, ones, strict=True)]
        for name, rates in ((f"DDP, 1 rank, batch {batch}", ones), (f"DDP, 2 ranks, batch {batch}", twos)):
            rows.append(row(f"{name}, a thread each: images/s", rates))
            beside.append(of_script(name, rates, ladder, device))
        rows.append(row(f"2 ranks / 1 rank, batch {batch}: images/s", ratios, ">=", goal))
        rows.append(row("the same without any communication: images/s", two_apart(folder, batch)))
    # Where there are too few GPUs for two ranks, both ran on CPUs, and have no place beside a GPU's rungs.
    return rows, beside if device.type == "cpu" or torch.cuda.device_count() > 1 else []


def jobs(folder: Path, data: Path, dataset: str) -> list[dict]:
    """The goals of checkpoints, Slurm and memory."""
    return [
        row("votes, a checkpoint each 50 steps / none: images/s", resumable_against_ddp(folder), ">=", 0.9),
        row("from submit to the first step, 4 ranks on 2 nodes: s", submit_to_step(folder), "<=", 20),
        row(f"peak memory of a rank, {dataset}: MB", memory(folder, data), "<=", 1500),
    ]
