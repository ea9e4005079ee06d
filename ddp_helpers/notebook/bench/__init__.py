"""The speed goals of the course, measured: what is compared takes turns, so that a busy machine slows both alike."""

import json
import os
import tempfile
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.notebook.bench.climb import climb, picture
from ddp_helpers.notebook.bench.jobs import collecting, plotting, records, submit_to_step
from ddp_helpers.notebook.bench.table import row
from ddp_helpers.notebook.bench.training import (
    cost_of_ddp,
    imports,
    memory,
    resumable_against_ddp,
    single_against_plain,
    two_against_one,
    two_apart,
)
from ddp_helpers.notebook.machine import machine
from ddp_helpers.rank.data import check_data
from ddp_helpers.rank.staging import stage
from ddp_helpers.rank.topology import Topology


def bench() -> None:
    """Measure every goal, print the table, write build/bench.json; one process calls it, on a quiet machine."""
    me, load, data = Topology.from_env(), os.getloadavg()[0], stage(ROOT / "data")
    device, dataset = me.device(), check_data(data)
    print(f"{machine()}; load {load:.1f} before the start: a machine that others use misses goals")
    ladder = climb(data, device)
    (ROOT / "build").mkdir(exist_ok=True)
    picture(ladder, f"{dataset}, batches of 64, {device.type.upper()}", ROOT / "build" / "bench.png")
    print(f"\n{'':<55} {'median':>8}  {'middle half':<16}   n  goal", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            row("import the helpers after torch and torchvision: s", imports(), "<=", 0.3),
            row("mnist_single / plain recipe: images/s", single_against_plain(folder), ">=", 5),
            row("mnist_single --compile / plain recipe: images/s", single_against_plain(folder, "--compile"), ">=", 5),
            row("DDP with one rank, slower than without: %", cost_of_ddp(data, me, device), "<=", 3),
            row("2 ranks / 1 rank, a thread each, batch 256: images/s", two_against_one(folder, 256), ">=", 1.9),
            row("the same without any communication: images/s", two_apart(folder, 256)),
            row("2 ranks / 1 rank, a thread each, batch 64: images/s", two_against_one(folder, 64), ">=", 1.5),
            row("the same without any communication: images/s", two_apart(folder, 64)),
            row("votes, a checkpoint each 50 steps / none: images/s", resumable_against_ddp(folder), ">=", 0.9),
            row("from submit to the first step, 4 ranks on 2 nodes: s", submit_to_step(folder), "<=", 20),
            row("collect 1,000 run records: s", collecting(records(folder, 1000)), "<=", 2),
            row("plot them: s", plotting(records(folder, 1000)), "<=", 5),
            row(f"peak memory of a rank, {dataset}: MB", memory(folder, data), "<=", 1500),
        ]
    record = {"machine": machine(), "device": str(device), "dataset": dataset, "load_before": load}
    record |= {"ladder": ladder, "rows": rows}
    (ROOT / "build" / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json and build/bench.png")
