"""How fast the scripts train: against the plain recipe, with DDP and without, on two ranks and on one."""

import io
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import accumulate
from pathlib import Path
from statistics import quantiles

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adadelta

from ddp_helpers.notebook import launch, runs, scripts, slurm
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.training import has_bf16, one_pass
from ddp_helpers.upkeep.bench.ladder import Held

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


def trainee(batches: Held, device: torch.device, wrap: bool) -> Callable[[], float]:
    """A function that trains a Net, in DDP as mnist_ddp wraps it or bare, for one pass: images per second."""
    model = Net().to(device, memory_format=torch.channels_last).train()
    model = DDP(model, gradient_as_bucket_view=True) if wrap else model
    flags = Namespace(precision="bf16" if has_bf16(device) else "float32", dry_run=False)
    optimizer = Adadelta(model.parameters())

    def speed() -> float:
        begin = time.perf_counter()
        one_pass(model, batches, flags, optimizer)
        return len(batches.labels) / (time.perf_counter() - begin)

    return speed


def imports() -> list[float]:
    """Seconds to import the helpers once torch and torchvision are there, in five processes."""
    command = [sys.executable, "-c", IMPORTS]
    return [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5)]


def digits(folder: Path) -> Path:
    """The images that all these runs train on."""
    return write_digits(folder / "digits", train=3072, test=256)


def rate(run: Path) -> float:
    """Images per second in the last epoch of a run; the first one warmed up."""
    return runs.read(run).epochs[-1]["images_per_second"]


def single(
    folder: Path, *flags: object, name: str = "mnist_single", processes: int = 1, threads: str | None = None
) -> float:
    """Images per second of a script for one device; of several processes that never talk, together."""
    script, run = scripts.write(name, folder / f"{name}.py"), runs.fresh(folder, "single")
    command = [sys.executable, script, "--data", digits(folder), "--epochs", "2", *map(str, flags), "--run-dir"]
    env = os.environ | ({"OMP_NUM_THREADS": threads} if threads else {})
    apart = [run / str(number) for number in range(processes)]
    started = [subprocess.Popen([*command, one], env=env, stdout=subprocess.DEVNULL) for one in apart]
    assert sum(process.wait() for process in started) == 0
    return sum(map(rate, apart))


def fast_against_plain(folder: Path, *flags: str) -> list[float]:
    """Measure the speed of mnist_fast as a multiple of PyTorch's own example, in turns."""
    plain_recipe = [sys.executable, "-m", "ddp_helpers.upkeep.bench.plain", str(digits(folder))]

    def plain() -> float:
        return float(subprocess.run(plain_recipe, capture_output=True, check=True).stdout)

    return [a / b for a, b in turns(45, lambda: single(folder, *flags, name="mnist_fast"), plain)]


def cost_of_ddp(data: Path, device: torch.device) -> list[float]:
    """Measure the cost of DDP on one rank, in per cent of the time without a group, in turns."""
    batches = Held(datasets(data)[0], 64 * (3 if device.type == "cpu" else 200), device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    claimed = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=claimed)
    try:
        pairs = turns(30, trainee(batches, device, wrap=False), trainee(batches, device, wrap=True))
    finally:
        dist.destroy_process_group()
    return [100 * (a / b - 1) for a, b in pairs[1:]]


def launched(folder: Path, data: Path, ranks: int, *flags: object, name: str = "mnist_ddp") -> launch.Launch:
    """A script as it is written out, on so many ranks of one thread each, and each rank's peak memory."""
    script = scripts.write(name, folder / f"{name}.py")
    (folder / "peak.py").write_text(PEAK)
    args = [script, "--data", data, "--log-interval", 10**9, *flags]
    if torch.cuda.device_count() < ranks:
        args.append("--no-cuda")
    with redirect_stdout(io.StringIO()):
        return launch.run(folder / "peak.py", *args, ranks=ranks, env={"OMP_NUM_THREADS": "1"})


def together(folder: Path, ranks: int, *flags: object, name: str = "mnist_ddp") -> float:
    """Images per second of a script on so many ranks of one thread each."""
    run = runs.fresh(folder, name)
    launched(folder, digits(folder), ranks, "--epochs", 2, "--run-dir", run, *flags, name=name)
    return rate(run)


def two_and_one(folder: Path, batch: int) -> list[tuple[float, float]]:
    """Images per second of two ranks of one thread and of one, in turns, at the same global batch."""
    flags = "--global-batch-size", batch
    return turns(45, lambda: together(folder, 2, *flags), lambda: together(folder, 1, *flags))


def two_apart(folder: Path, batch: int) -> list[float]:
    """Measure the speed-up of two processes without communication, each at half the batch: the bound for two ranks."""

    def speed_of(processes: int) -> float:
        flags = "--no-cuda", "--batch-size", batch // processes
        return single(folder, *flags, processes=processes, threads="1")

    return [a / b for a, b in turns(30, lambda: speed_of(2), lambda: speed_of(1))]


def resumable_against_ddp(folder: Path) -> list[float]:
    """Measure mnist_ddp_resumable, a checkpoint each 50 steps, as a multiple of mnist_ddp's speed, on 2 ranks."""

    def saving() -> float:
        flags = "--batch-size", 32, "--checkpoint-every", 50
        return together(folder, 2, *flags, name="mnist_ddp_resumable")

    return [a / b for a, b in turns(45, saving, lambda: together(folder, 2, "--batch-size", 32))]


def memory(folder: Path, data: Path) -> list[float]:
    """The most MB that each of two ranks holds: all data, a training step, the whole test."""
    said = launched(folder, data, 2, "--epochs", 1, "--dry-run").lines
    return [float(text.split()[1]) for _, text in said if text.startswith("peak")]


def submit_to_step(folder: Path) -> list[float]:
    """Seconds from submitting a job of 4 ranks on 2 nodes to its first training step; none without Slurm."""
    if not slurm.available():
        return []
    data, site, waited = digits(folder), slurm.Site.load("local"), []
    words = ("--data", str(data), "--epochs", "1", "--log-interval", "1", "--run-dir", "{run_dir}")
    for number in range(3):
        run = folder / f"job{number}"
        slurm.prepare("mnist_ddp", words, site, run, nodes=2, tasks_per_node=2, gpus_per_node=2)
        begin = time.monotonic()
        with redirect_stdout(io.StringIO()):
            slurm.submit(run)
            while not any("1/12" in line for line in slurm.said(run, 0)) and time.monotonic() < begin + 120:
                time.sleep(0.05)
            waited.append(time.monotonic() - begin)
            slurm.watch(run)
    return waited


def row(name: str, values: list[float], sign: str = "<=", goal: float | None = None) -> dict:
    """Print a row of the table: the median, the middle half of the values, the goal if there is one; return the row."""
    asked, verdict, met = "no goal", "", None
    if not values:
        print(f"{name:<55} not measured: it needs what this machine lacks", flush=True)
        return {"name": name, "median": None, "values": [], "goal": goal and f"{sign} {goal}", "met": None}
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    if goal is not None:
        met = middle <= goal if sign == "<=" else middle >= goal
        asked, verdict = f"{sign} {goal:<5g}", " met" if met else " MISSED"
    digits = 0 if middle > 100 else 3
    spread = f"{low:.{digits}f} to {high:.{digits}f}"
    print(f"{name:<55} {middle:8.{digits}f}  {spread:<16} {len(values):3}  {asked}{verdict}", flush=True)
    return {"name": name, "median": middle, "values": values, "goal": goal and f"{sign} {goal}", "met": met}


def turns(seconds: float, a: Callable[[], float], b: Callable[[], float]) -> list[tuple[float, float]]:
    """Measure a and b in turns, A B B A, for so many seconds and at least three times; returns the pairs."""
    pairs, end = [], time.monotonic() + seconds
    while len(pairs) < 3 or time.monotonic() < end:
        first, second = (a, b) if len(pairs) % 2 == 0 else (b, a)
        pair = first(), second()
        pairs.append(pair if first is a else pair[::-1])
    return pairs


def epochs(folder: Path, data: Path, count: int) -> list[dict]:
    """Train so many epochs with the defaults of mnist_fast, and give their lines in the record."""
    script, run = scripts.write("mnist_fast", folder / "mnist_fast.py"), runs.fresh(folder, "whole")
    command = [sys.executable, script, "--data", data, "--epochs", str(count), "--run-dir", run]
    subprocess.run([*command, "--log-interval", "1000000"], check=True, stdout=subprocess.DEVNULL)
    return runs.read(run).epochs


def seconds_to(lines: list[dict], accuracy: float) -> list[float]:
    """Seconds of training up to the first epoch whose test is as accurate; none if no epoch is."""
    spent = accumulate(line["seconds"] for line in lines)
    reached = (took for took, line in zip(spent, lines, strict=True) if line["test_accuracy"] >= accuracy)
    return [next(reached)] if any(line["test_accuracy"] >= accuracy for line in lines) else []
