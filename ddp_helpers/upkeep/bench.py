"""Measure the speed goals of the course, on one quiet machine; `make bench` calls it.

What is compared takes turns, so that a busy machine slows both alike. It runs in one process, which
starts the ranks, and jobs where a Slurm answers. The ladder of one device is notebook 01. It has no
flags: what stands behind its name on the command line would be read as mnist_ddp's.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adadelta

from ddp_helpers import ROOT, jobs
from ddp_helpers.data.digits import write_digits
from ddp_helpers.launch import launch
from ddp_helpers.launch.launchers import enough_gpus
from ddp_helpers.launch.machine import provenance
from ddp_helpers.rank import scripts
from ddp_helpers.rank.device import has_bf16, pick_device
from ddp_helpers.rank.scripts.mnist_ddp import Net, one_pass, read_flags
from ddp_helpers.records import runs

IMPORTS = """
import time, torch, torchvision
begin = time.perf_counter()
import ddp_helpers, ddp_helpers.rank.scripts.mnist_ddp
print(time.perf_counter() - begin)
"""
# Runs the script that follows on the command line, then says the most memory that this process has
# had (on Linux; not with getrusage, which also counts what the launcher held before it became this
# process).
_PEAK = """
import re, runpy, sys
from pathlib import Path
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
print("peak", int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""
_Measure = Callable[[], float]


def ratios(a: _Measure, b: _Measure, times: int = 3) -> list[float]:
    """Measure a as a multiple of b, `times` times, in turns: A B, B A."""
    multiples = []
    for turn in range(times):
        order = (a, b) if turn % 2 == 0 else (b, a)
        measured = {measure: measure() for measure in order}
        multiples.append(measured[a] / measured[b])
    return multiples


def _digits(folder: Path) -> Path:
    """Make the images that all these runs train on, once."""
    return write_digits(folder / "digits", train=3072, test=256)


def printed_number(*arguments: object) -> float:
    """Run Python with these arguments, and return the number that it prints."""
    command = [sys.executable, *map(str, arguments)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def speed(folder: Path, name: str, *flags: object, ranks: int = 0) -> float:
    """Measure a script's images per second in the second of two epochs.

    ranks: how many, of one thread each; with 0 it runs by itself.
    """
    script = scripts.write_script(name, folder / f"{name}.py")
    record = runs.new_run_folder(folder, name)
    arguments = ["--data", _digits(folder), "--epochs", 2]
    arguments += ["--run-dir", record, *flags]
    if not enough_gpus(ranks):
        arguments.append("--no-cuda")
    with redirect_stdout(io.StringIO()):
        if ranks:
            launch.run(script, *arguments, ranks=ranks, env={"OMP_NUM_THREADS": "1"})
        else:
            launch.run(script, *arguments, launcher="python")
    return runs.read_run(record).epochs[-1]["images_per_second"]


def _trainer(model: nn.Module, device: torch.device) -> _Measure:
    """Return what measures a model's training, in passes over a few batches a second."""
    flags = read_flags(1)
    flags.bf16, flags.log_interval = has_bf16(device), 10**9
    images = torch.rand(64, 1, 28, 28, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (64,), device=device)
    times = 200 if device.type == "cuda" else 3
    batches: Any = [(images, labels)] * times  # no loader to wait for
    optimizer = Adadelta(model.parameters())

    def passes_per_second() -> float:
        begin = time.perf_counter()
        one_pass(model, batches, flags, optimizer)
        return 1 / (time.perf_counter() - begin)

    passes_per_second()  # warms up
    return passes_per_second


def _net(device: torch.device) -> nn.Module:
    """Make the course's network on a device, in the order of memory that is fastest there."""
    net = Net().to(device)
    # torch's stubs know no memory_format of a module.
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _cost_of_ddp(device: torch.device, times: int = 100) -> list[float]:
    """Measure the cost of DDP on one rank, in per cent of the time without a group, in turns."""
    backend, claimed = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=claimed)
    try:
        bare = _trainer(_net(device), device)
        wrapped = _trainer(DDP(_net(device), gradient_as_bucket_view=True), device)
        return [100 * (ratio - 1) for ratio in ratios(bare, wrapped, times)]
    finally:
        dist.destroy_process_group()


def peak_memory(folder: Path) -> list[float]:
    """Measure the most MB that each of two ranks of mnist_ddp holds: a step, the whole test."""
    script = scripts.write_script("mnist_ddp", folder / "mnist_ddp.py")
    witness = folder / "peak.py"
    witness.write_text(_PEAK)
    arguments = ("--data", _digits(folder), "--epochs", 1, "--dry-run")
    with redirect_stdout(io.StringIO()):
        ran = launch.run(witness, script, *arguments, ranks=2)
    return [float(text.split()[1]) for _, text in ran.lines if text.startswith("peak")]


_FIRST_STEP = "] 1/"  # of rank 0's line of progress
_WAIT_SECONDS = 120


def submit_to_step(folder: Path) -> list[float]:
    """Measure the seconds from submitting a job of 4 ranks on 2 nodes to its first step.

    Three times; none without Slurm.
    """
    arguments = ["--data", str(_digits(folder)), "--epochs", "1", "--log-interval", "1"]
    arguments += ["--run-dir", "{run_dir}"]
    site, waited = jobs.Site.load("local"), []
    for number in range(3 if jobs.available() else 0):
        run = folder / f"job{number}"
        jobs.prepare(
            "mnist_ddp",
            arguments,
            site,
            run,
            nodes=2,
            tasks_per_node=2,
            gpus_per_node=2,
        )
        begin = time.monotonic()
        with redirect_stdout(io.StringIO()):
            jobs.submit(run)
            while time.monotonic() < begin + _WAIT_SECONDS:
                if any(_FIRST_STEP in line for line in jobs.rank_lines(run, 0)):
                    break
                time.sleep(0.05)
            waited.append(time.monotonic() - begin)
            jobs.watch(run)
    return waited


def goals(folder: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure what has a goal: a row for each, printed as soon as it is measured."""
    least = 50 if device.type == "cuda" else 4  # times as fast

    def ddp(ranks: int, batch: int) -> _Measure:
        flags = ("--log-interval", 10**9, "--batch-size", batch)
        return lambda: speed(folder, "mnist_ddp", *flags, ranks=ranks)

    def saving() -> float:
        flags = ("--log-interval", 10**9, "--batch-size", 64, "--checkpoint-every", 50)
        return speed(folder, "mnist_ddp_resumable", *flags, ranks=2)

    def plain() -> float:
        return speed(folder, "mnist_ddp", "--num-workers", 0, "--log-interval", 10**9)

    def fast() -> float:
        return speed(folder, "mnist_fast", *(["--bf16"] if has_bf16(device) else []))

    imports = [printed_number("-c", IMPORTS) for _ in range(3)]
    yield row("import the helpers after torch and torchvision: s", imports, "<=", 0.3)
    name = "mnist_fast / mnist_ddp, one device, no workers: images/s"
    yield row(name, ratios(fast, plain), ">=", least)
    yield row("DDP with one rank, slower than without: %", _cost_of_ddp(device), "<=", 3)
    for batch, goal in ((64, 1.5), (256, 1.9)):
        two_ranks = ratios(ddp(2, batch), ddp(1, batch))
        yield row(f"2 ranks / 1 rank, batch {batch}: images/s", two_ranks, ">=", goal)
    with_votes = ratios(saving, ddp(2, 64))
    yield row("votes, a checkpoint each 50 steps / none: images/s", with_votes, ">=", 0.9)
    seconds = submit_to_step(folder)
    yield row("from submit to the first step, 4 ranks on 2 nodes: s", seconds, "<=", 20)
    yield row("peak memory of a rank: MB", peak_memory(folder), "<=", 1500)


def row(name: str, values: list[float], sign: str, goal: float) -> dict[str, Any]:
    """Print a row of the table: median, the middle half of the values, goal; return it for JSON.

    sign: "<=" or ">=", by which the median is compared with the goal. Where the goal lies within
    the middle half, the next run could say the opposite: it is undecided.
    """
    record: dict[str, Any] = {"name": name, "median": None, "values": values}
    record |= {"goal": f"{sign} {goal}", "met": None}
    if not values:
        print(f"{name:<55} not measured: it needs Slurm", flush=True)
        return record
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    is_met = middle <= goal if sign == "<=" else middle >= goal
    met = None if low < goal < high else is_met
    places = 0 if middle > 100 else 3
    spread = f"{low:.{places}f} to {high:.{places}f}"
    word = {True: "met", False: "MISSED", None: "undecided"}[met]
    measured = f"{middle:8.{places}f}  {spread:<16} {len(values):3}"
    print(f"{name:<55} {measured}  {sign} {goal:<5g} {word}", flush=True)
    return record | {"median": middle, "met": met}


def bench() -> None:
    """Measure every goal, print the table, write build/bench.json; one process, a quiet machine.

    The file is written after each row, so that an interrupt keeps what was measured.
    """
    device, load, path = pick_device(0), os.getloadavg()[0], ROOT / "build" / "bench.json"
    record: dict[str, Any] = provenance() | {"device": str(device), "load_before": load, "rows": []}
    quiet = "" if load <= (os.cpu_count() or 1) / 2 else ": not quiet"
    print(f"{record['machine']}; load {load:.1f} before the start{quiet}")
    if device.type == "cuda":
        print("the goals are those of CPUs, but for mnist_fast's: on GPUs nobody has measured them")
    print(f"\n{'':<55} {'median':>8}  {'middle half':<16}   n  goal", flush=True)
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for measured in goals(Path(folder), device):
            record["rows"].append(measured)
            path.write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json")


if __name__ == "__main__":
    bench()
