"""Measure the speed goals of the course, on one quiet machine.

Compared measurements alternate, so that a busy machine slows both equally. It runs in one process,
which starts the ranks. The ladder of one device is notebook 12's. It has no flags: any arguments
would be read as mnist_ddp's.
"""

import io
import json
import os
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

from ddp_helpers import ROOT
from ddp_helpers.data.digits import write_digits
from ddp_helpers.launch import launch
from ddp_helpers.launch.launchers import enough_gpus
from ddp_helpers.launch.machine import provenance
from ddp_helpers.rank import scripts
from ddp_helpers.rank.device import has_bf16, pick_device
from ddp_helpers.rank.scripts.mnist_ddp import Net, one_pass, read_flags
from ddp_helpers.records import runs

_Measure = Callable[[], float]


def ratios(a: _Measure, b: _Measure, times: int) -> list[float]:
    """Measure a as a multiple of b, `times` times, alternating: A B, B A."""
    multiples = []
    for turn in range(times):
        order = (a, b) if turn % 2 == 0 else (b, a)
        measured = {measure: measure() for measure in order}
        multiples.append(measured[a] / measured[b])
    return multiples


def _script(folder: Path, name: str, *flags: object, ranks: int = 0) -> _Measure:
    """Return a function that measures a script's images per second in the second of two epochs.

    ranks: the number of ranks, with one thread each; with 0 it runs without a launcher.
    """
    script = scripts.write_script(name, folder / f"{name}.py")
    data = write_digits(folder / "digits", train=3072, test=256)  # once for all scripts
    arguments = ["--data", data, "--epochs", 2, *flags]
    if not enough_gpus(ranks):
        arguments.append("--no-cuda")

    def images_per_second() -> float:
        record = runs.new_run_folder(folder, name)
        with redirect_stdout(io.StringIO()):
            if ranks:
                env = {"OMP_NUM_THREADS": "1"}
                launch.run(script, *arguments, "--run-dir", record, ranks=ranks, env=env)
            else:
                launch.run(script, *arguments, "--run-dir", record, launcher="python")
        return runs.read_run(record).epochs[-1]["images_per_second"]

    return images_per_second


def _trainer(model: nn.Module, device: torch.device) -> _Measure:
    """Return a function that measures training: passes over a few batches per second."""
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
    """Make the course's network on a device, in the memory format that is fastest there."""
    net = Net().to(device)
    # torch's stubs have no memory_format for a module.
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _cost_of_ddp(device: torch.device, times: int) -> list[float]:
    """Measure the cost of DDP on one rank, in per cent of the time without a group, alternating."""
    backend, claimed = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=claimed)
    try:
        bare = _trainer(_net(device), device)
        wrapped = _trainer(DDP(_net(device), gradient_as_bucket_view=True), device)
        return [100 * (ratio - 1) for ratio in ratios(bare, wrapped, times)]
    finally:
        dist.destroy_process_group()


def _goals(folder: Path, device: torch.device, times: int) -> Iterator[dict[str, Any]]:
    """Measure every goal: one row each, printed as soon as it is measured."""
    quiet = ("--log-interval", 10**9)
    fast = _script(folder, "mnist_fast", *(["--bf16"] if has_bf16(device) else []))
    plain = _script(folder, "mnist_ddp", "--num-workers", 0, *quiet)
    least = 50 if device.type == "cuda" else 4  # times as fast
    name = "mnist_fast / mnist_ddp, one device, no workers: images/s"
    yield row(name, ratios(fast, plain, times), ">=", least)
    cost = _cost_of_ddp(device, 33 * times)
    yield row("DDP with one rank, slower than without: %", cost, "<=", 3)
    for batch, goal in ((64, 1.5), (256, 1.9)):
        one, two = (
            _script(folder, "mnist_ddp", "--batch-size", batch, *quiet, ranks=ranks)
            for ranks in (1, 2)
        )
        yield row(f"2 ranks / 1 rank, batch {batch}: images/s", ratios(two, one, times), ">=", goal)


def row(name: str, values: list[float], sign: str, goal: float) -> dict[str, Any]:
    """Print a row of the table: median, the middle half of the values, goal; return it for JSON.

    sign: "<=" or ">=", by which the median is compared with the goal. If the goal is within the
    middle half, the next run could give the opposite result: it is undecided.
    """
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    is_met = middle <= goal if sign == "<=" else middle >= goal
    met = None if low < goal < high else is_met
    spread = f"{low:.3f} to {high:.3f}"
    word = {True: "met", False: "MISSED", None: "undecided"}[met]
    print(f"{name:<55} {middle:8.3f}  {spread:<16} {sign} {goal:<5g} {word}", flush=True)
    return {"name": name, "median": middle, "values": values, "goal": f"{sign} {goal}", "met": met}


def bench(times: int = 3) -> None:
    """Measure every goal, print the table, write build/bench.json; one process, a quiet machine.

    The file is written after each row, so that an interrupt keeps what was measured.
    """
    device, load, path = pick_device(0), os.getloadavg()[0], ROOT / "build" / "bench.json"
    record: dict[str, Any] = provenance() | {"device": str(device), "load_before": load, "rows": []}
    quiet = "" if load <= (os.cpu_count() or 1) / 2 else ": not quiet"
    print(f"{record['machine']}; load {load:.1f} before the start{quiet}")
    if device.type == "cuda":
        print("the goals are those of CPUs, but for mnist_fast's: on GPUs nobody has measured them")
    print(f"\n{'':<55} {'median':>8}  {'middle half':<16} goal", flush=True)
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for measured in _goals(Path(folder), device, times):
            record["rows"].append(measured)
            path.write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json")


if __name__ == "__main__":
    bench()
