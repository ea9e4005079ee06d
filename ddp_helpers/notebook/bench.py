"""The speed goals of the course, measured: what is compared takes turns, so that a busy machine slows both alike."""

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
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adadelta

from ddp_helpers import ROOT
from ddp_helpers.notebook import launch, runs, scripts
from ddp_helpers.notebook.machine import machine
from ddp_helpers.rank.data import Batches, check_data, load_data
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.process_group import process_group
from ddp_helpers.rank.staging import stage
from ddp_helpers.rank.topology import Topology
from ddp_helpers.rank.training import train_epoch

QUIET = Namespace(log_interval=1, dry_run=False, bf16=False)  # what train_epoch asks of the flags
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


def row(name: str, values: list[float], sign: str, goal: float) -> dict:
    """Print a row of the table: the median, the middle half of the values, the goal. Returns it for the record."""
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    met, digits = middle <= goal if sign == "<=" else middle >= goal, 0 if middle > 100 else 3
    spread, verdict = f"{low:.{digits}f} to {high:.{digits}f}", "met" if met else "MISSED"
    print(f"{name:<55} {middle:8.{digits}f}  {spread:<16} {len(values):3}  {sign} {goal:<5g} {verdict}", flush=True)
    return {"name": name, "median": middle, "values": values, "goal": f"{sign} {goal}", "met": met}


def turns(seconds: float, a: Callable[[], float], b: Callable[[], float]) -> list[tuple[float, float]]:
    """What a and b measure, taking turns, A B B A, for so many seconds and at least three times."""
    pairs, end = [], time.monotonic() + seconds
    while len(pairs) < 3 or time.monotonic() < end:
        first, second = (a, b) if len(pairs) % 2 == 0 else (b, a)
        pair = first(), second()
        pairs.append(pair if first is a else pair[::-1])
    return pairs


def speed(model: nn.Module, optimizer: Adadelta, batches: Batches) -> float:
    """Images per second of one pass."""
    train_epoch(model, optimizer, batches, QUIET, "")
    return len(batches.sampler) / batches.took


def trainee(device: torch.device, wrap: bool = False) -> tuple[nn.Module, Adadelta]:
    """A Net, in DDP as mnist_ddp wraps it or bare, and its optimizer."""
    model = Net().to(device)
    return DDP(model, gradient_as_bucket_view=True) if wrap else model, Adadelta(model.parameters())


def imports() -> list[float]:
    """Seconds to import the helpers once torch and torchvision are there, in five processes."""
    command = [sys.executable, "-c", IMPORTS]
    return [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5)]


def single_against_plain(folder: Path, *flags: str) -> list[float]:
    """How many times faster mnist_single is, which holds the data on the device, than the plain recipe."""
    data, number = write_digits(folder / "digits", train=3072, test=256), iter(range(99))
    script = scripts.write("mnist_single", folder / "mnist_single.py")
    plain_recipe = [sys.executable, "-m", "ddp_helpers.notebook.plain", str(data)]

    def single() -> float:
        run = folder / f"single{''.join(flags)}{next(number)}"
        command = [sys.executable, script, "--data", data, "--epochs", "2", "--run-dir", run, *flags]
        subprocess.run(command, capture_output=True, check=True)
        return runs.read(run).epochs[-1]["images_per_second"]  # the first epoch warms up

    def plain() -> float:
        return float(subprocess.run(plain_recipe, capture_output=True, check=True).stdout)

    return [a / b for a, b in turns(45, single, plain)]


def cost_of_ddp(data: Path, me: Topology, device: torch.device) -> list[float]:
    """How many per cent slower a group of one rank is than no group."""
    train_set = load_data(data)[0]
    some = torch.randperm(len(train_set))[: 64 * (3 if device.type == "cpu" else 200)].tolist()
    batches = Batches(train_set, some, 64, device, None)
    with process_group(me, device, 60):
        bare, wrapped = trainee(device), trainee(device, wrap=True)
        pairs = turns(30, lambda: speed(*bare, batches), lambda: speed(*wrapped, batches))
    return [100 * (a / b - 1) for a, b in pairs[1:]]


def launched(folder: Path, data: Path, ranks: int, *flags: object) -> launch.Launch:
    """mnist_ddp as it is written out, on so many ranks of one thread each, and each rank's peak memory."""
    script = scripts.write("mnist_ddp", folder / "mnist_ddp.py")
    (folder / "peak.py").write_text(PEAK)
    args = [script, "--data", data, "--log-interval", 10**9, *flags]
    if torch.cuda.device_count() < ranks:
        args.append("--no-cuda")
    with redirect_stdout(io.StringIO()):
        return launch.run(folder / "peak.py", *args, ranks=ranks, env={"OMP_NUM_THREADS": "1"})


def two_against_one(folder: Path) -> list[float]:
    """How many times faster two ranks of one thread train than one, at the same global batch."""
    data, number = write_digits(folder / "digits", train=3072, test=256), iter(range(99))

    def speed_of(ranks: int) -> float:
        run = folder / f"run{next(number)}"
        launched(folder, data, ranks, "--global-batch-size", 256, "--epochs", 2, "--run-dir", run)
        return runs.read(run).epochs[-1]["images_per_second"]  # the first epoch warms up

    return [a / b for a, b in turns(45, lambda: speed_of(2), lambda: speed_of(1))]


def memory(folder: Path, data: Path) -> list[float]:
    """The most MB that each of two ranks holds: all data, a training step, the whole test."""
    said = launched(folder, data, 2, "--epochs", 1, "--dry-run").lines
    return [float(text.split()[1]) for _, text in said if text.startswith("peak")]


def bench() -> None:
    """Measure every goal, print the table, write build/bench.json; one process calls it, on a quiet machine."""
    me, load, data = Topology.from_env(), os.getloadavg()[0], stage(ROOT / "data")
    device, dataset = me.device(), check_data(data)
    print(f"{machine()}; load {load:.1f} before the start: a machine that others use misses goals")
    print(f"{'':<55} {'median':>8}  {'middle half':<16}   n  goal", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            row("import the helpers after torch and torchvision: s", imports(), "<=", 0.3),
            row("mnist_single / plain recipe: images/s", single_against_plain(folder), ">=", 1.8),
            row("mnist_single --bf16 / plain recipe: images/s", single_against_plain(folder, "--bf16"), ">=", 1.8),
            row("DDP with one rank, slower than without: %", cost_of_ddp(data, me, device), "<=", 3),
            row("2 ranks / 1 rank, a thread each, batch 256: images/s", two_against_one(folder), ">=", 1.8),
            row(f"peak memory of a rank, {dataset}: MB", memory(folder, data), "<=", 1500),
        ]
    record = {"machine": machine(), "device": str(device), "dataset": dataset, "load_before": load, "rows": rows}
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json")
