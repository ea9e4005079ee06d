"""Measure the speed goals of the course; what is compared takes turns, so that a busy machine slows both alike.

The ladder of one device is notebook 01.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import quantiles

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adadelta

from ddp_helpers import ROOT, jobs
from ddp_helpers.launch import launch, scripts
from ddp_helpers.launch.machine import provenance
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.group import claim_device
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.training import has_bf16, one_pass
from ddp_helpers.records import runs

IMPORTS = """
import time, torch, torchvision
begin = time.perf_counter()
import ddp_helpers, ddp_helpers.rank.scripts.mnist_ddp
print(time.perf_counter() - begin)
"""
# Runs the script that follows on the command line, then says the most memory that this process has had (on Linux;
# not with getrusage, which also counts what the launcher held before it became this process).
PEAK = """
import re, runpy, sys
from pathlib import Path
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
print("peak", int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""


def ratios(a: Callable[[], float], b: Callable[[], float], times: int = 3) -> list[float]:
    """Measure a as a multiple of b, in turns: A B, B A."""
    found = []
    for turn in range(times):
        measured = {measure: measure() for measure in ((a, b) if turn % 2 == 0 else (b, a))}
        found.append(measured[a] / measured[b])
    return found


def digits(folder: Path) -> Path:
    """Make the images that all these runs train on, once."""
    return write_digits(folder / "digits", train=3072, test=256)


def printed(*words: object) -> float:
    """Run Python with these words, and return the number that it prints."""
    return float(subprocess.run([sys.executable, *map(str, words)], capture_output=True, check=True).stdout)


def speed(folder: Path, name: str, *flags: object, ranks: int = 0) -> float:
    """Images per second of a script in the second of two epochs: by itself, or on ranks of one thread each."""
    script, run = scripts.write(name, folder / f"{name}.py"), runs.fresh(folder, name)
    args = ["--data", digits(folder), "--epochs", 2, "--log-interval", 10**9, "--run-dir", run, *flags]
    args += ["--no-cuda"] if torch.cuda.device_count() < ranks else []
    how = {"ranks": ranks, "env": {"OMP_NUM_THREADS": "1"}} if ranks else {"launcher": "python"}
    with redirect_stdout(io.StringIO()):
        launch.run(script, *args, **how)
    return runs.read(run).epochs[-1]["images_per_second"]


def cost_of_ddp(device: torch.device, times: int = 100) -> list[float]:
    """Measure the cost of DDP on one rank, in per cent of the time without a group, in turns."""
    flags = Namespace(precision="bf16" if has_bf16(device) else "float32", dry_run=False)
    images = torch.rand(64, 1, 28, 28, device=device).to(memory_format=torch.channels_last)
    batches = [(images, torch.randint(10, (64,), device=device))] * (200 if device.type == "cuda" else 3)

    def trainer(wrap: Callable[[Net], torch.nn.Module]) -> Callable[[], float]:
        model = wrap(Net().to(device, memory_format=torch.channels_last))
        optimizer = Adadelta(model.parameters())

        def passes_per_second() -> float:
            begin = time.perf_counter()
            one_pass(model, batches, flags, optimizer)
            return 1 / (time.perf_counter() - begin)

        passes_per_second()  # warms up
        return passes_per_second

    backend, claimed = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=claimed)
    try:
        bare, wrapped = trainer(lambda net: net), trainer(lambda net: DDP(net, gradient_as_bucket_view=True))
        return [100 * (ratio - 1) for ratio in ratios(bare, wrapped, times)]
    finally:
        dist.destroy_process_group()


def memory(folder: Path) -> list[float]:
    """Measure the most MB that each of two ranks of mnist_ddp holds: a training step, the whole test."""
    script = scripts.write("mnist_ddp", folder / "mnist_ddp.py")
    (folder / "peak.py").write_text(PEAK)
    with redirect_stdout(io.StringIO()):
        said = launch.run(folder / "peak.py", script, "--data", digits(folder), "--epochs", 1, "--dry-run", ranks=2)
    return [float(text.split()[1]) for _, text in said.lines if text.startswith("peak")]


def submit_to_step(folder: Path) -> list[float]:
    """Measure the seconds from submitting a job of 4 ranks on 2 nodes to its first step; none without Slurm."""
    words = ("--data", str(digits(folder)), "--epochs", "1", "--log-interval", "1", "--run-dir", "{run_dir}")
    site, waited = jobs.Site.load("local"), []
    for number in range(3 if jobs.available() else 0):
        run = folder / f"job{number}"
        jobs.prepare("mnist_ddp", words, site, run, nodes=2, tasks_per_node=2, gpus_per_node=2)
        begin = time.monotonic()
        with redirect_stdout(io.StringIO()):
            jobs.submit(run)
            while not any("] 1/" in line for line in jobs.said(run, 0)) and time.monotonic() < begin + 120:
                time.sleep(0.05)
            waited.append(time.monotonic() - begin)
            jobs.watch(run)
    return waited


def goals(folder: Path, device: torch.device) -> list[dict]:
    """Measure what has a goal, and print a row for each."""

    def ddp(ranks: int, batch: int) -> Callable[[], float]:
        return lambda: speed(folder, "mnist_ddp", "--batch-size", batch, ranks=ranks)

    def saving() -> float:
        flags = "--batch-size", 64, "--checkpoint-every", 50
        return speed(folder, "mnist_ddp_resumable", *flags, ranks=2)

    def plain() -> float:
        return speed(folder, "mnist_single", "--precision", "float32", "--num-workers", 0)

    fast = ratios(lambda: speed(folder, "mnist_fast"), plain)
    return [
        row("import the helpers after torch and torchvision: s", [printed("-c", IMPORTS) for _ in range(3)], "<=", 0.3),
        row("mnist_fast / mnist_single, no workers: images/s", fast, ">=", 50 if device.type == "cuda" else 4),
        row("DDP with one rank, slower than without: %", cost_of_ddp(device), "<=", 3),
        row("2 ranks / 1 rank, batch 64: images/s", ratios(ddp(2, 64), ddp(1, 64)), ">=", 1.5),
        row("2 ranks / 1 rank, batch 256: images/s", ratios(ddp(2, 256), ddp(1, 256)), ">=", 1.9),
        row("votes, a checkpoint each 50 steps / none: images/s", ratios(saving, ddp(2, 64)), ">=", 0.9),
        row("from submit to the first step, 4 ranks on 2 nodes: s", submit_to_step(folder), "<=", 20),
        row("peak memory of a rank: MB", memory(folder), "<=", 1500),
    ]


def row(name: str, values: list[float], sign: str, goal: float) -> dict:
    """Print a row of the table: the median, the middle half of the values, and the goal; return the row."""
    if not values:
        print(f"{name:<55} not measured: it needs Slurm", flush=True)
        return {"name": name, "median": None, "values": [], "goal": f"{sign} {goal}", "met": None}
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    met = middle <= goal if sign == "<=" else middle >= goal
    digits = 0 if middle > 100 else 3
    spread, verdict = f"{low:.{digits}f} to {high:.{digits}f}", f"{sign} {goal:<5g} {'met' if met else 'MISSED'}"
    print(f"{name:<55} {middle:8.{digits}f}  {spread:<16} {len(values):3}  {verdict}", flush=True)
    return {"name": name, "median": middle, "values": values, "goal": f"{sign} {goal}", "met": met}


def bench() -> None:
    """Measure every goal, print the table, write build/bench.json; one process, on a quiet machine."""
    device, load = claim_device(0), os.getloadavg()[0]
    record = provenance() | {"device": str(device), "load_before": load}
    print(f"{record['machine']}; load {load:.1f} before the start: a machine that others use misses goals")
    print(f"\n{'':<55} {'median':>8}  {'middle half':<16}   n  goal", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        record["rows"] = goals(Path(folder), device)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json")
