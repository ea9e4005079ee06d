"""Measure the speed goals of the course; what is compared takes turns, so that a busy machine slows both alike."""

import io
import json
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adadelta
from torch.utils.data import DataLoader, Subset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.datasets import MNIST

from ddp_helpers import ROOT
from ddp_helpers.lessons.train_on_one_gpu.figures import ladder as draw
from ddp_helpers.notebook import launch, runs, scripts
from ddp_helpers.notebook.machine import provenance
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.group import claim_device
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.scripts.mnist_fast import held
from ddp_helpers.rank.staging import check_data, stage
from ddp_helpers.rank.training import has_bf16, one_pass

TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class Held:
    """The first images, [n, 1, 28, 28], and their labels, held on the device: batches in a new order each pass."""

    def __init__(self, data: MNIST, count: int, device: torch.device, size: int = 64) -> None:
        self.images, self.labels = (whole[:count] for whole in held(data, device))
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.labels), device=self.labels.device).split(self.size):
            yield self.images[index], self.labels[index]


@dataclass(frozen=True)
class Rung:
    """A recipe of notebook 01. Each of its fields is one change from the plain one, which these defaults are."""

    name: str = "plain loader"
    workers: int | None = 0  # DataLoader processes; None holds the data on the device
    layout: torch.memory_format = torch.contiguous_format
    precision: str = "float32"
    net: type[nn.Module] = Net
    ddp: bool = False  # wrapped as mnist_ddp wraps it

    def trainer(self, data: MNIST, count: int, device: torch.device) -> Callable[[], float]:
        """Make a function that trains for one pass over the first images, and returns images per second."""
        model = self.net().to(device, memory_format=self.layout).train()
        model = DDP(model, gradient_as_bucket_view=True) if self.ddp else model
        optimizer, flags = Adadelta(model.parameters()), Namespace(precision=self.precision, dry_run=False)
        loading = {"num_workers": self.workers or 0, "persistent_workers": bool(self.workers), "shuffle": True}
        loading["pin_memory"] = bool(self.workers) and device.type == "cuda"
        some = Subset(data, range(count))
        batches = Held(data, count, device) if self.workers is None else DataLoader(some, 64, **loading)

        def train() -> float:
            begin = time.perf_counter()
            one_pass(model, batches, flags, optimizer)
            return count / (time.perf_counter() - begin)

        return train


def rungs(device: torch.device) -> list[Rung]:
    """The ladder from the bottom, without what this device cannot do."""
    ladder = [Rung(), Rung("workers, pinned memory", workers=2), Rung("data on the device", workers=None)]
    ladder.append(replace(ladder[-1], name="channels last", layout=torch.channels_last))
    if has_bf16(device):
        ladder.append(replace(ladder[-1], name="bfloat16", precision="bf16"))
    return [*ladder, replace(ladder[-1], name="less work", net=FastNet)]


def in_turns(measures: dict[str, Callable[[], float]], times: int) -> dict[str, list[float]]:
    """Call each so many times, A B C, C B A, so that a busy machine slows all alike."""
    found = {name: [] for name in measures}
    for turn in range(times):
        for name in list(measures)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(measures[name]())
    return found


def trained(ladder: list[Rung], data: MNIST, count: int, device: torch.device, times: int) -> dict[str, list[float]]:
    """Images per second of each recipe, in turns, after a pass that warms up."""
    trainers = {rung.name: rung.trainer(data, count, device) for rung in ladder}
    in_turns(trainers, 1)
    return in_turns(trainers, times)


def matrix_rate(precision: str, device: torch.device) -> float:
    """Measure operations per second of large matrix products, the best of all: what arithmetic can reach here."""
    best = 0.0
    for side in (256, 512, 1024, 2048) if device.type == "cpu" else (8192,):
        matrix = torch.randn(side, side, device=device).to(TYPES[precision])
        for _ in range(10):
            begin = time.perf_counter()
            (matrix @ matrix)[0, 0].item()  # waits for a GPU to be done
            took = time.perf_counter() - begin
            best = max(best, 2 * side**3 / took)
            if took > 0.3:  # some processors take minutes for a large product in bfloat16, and are no faster there
                return best
    return best


def operations() -> int:
    """Count the multiplications and additions that training the Net needs for one image."""
    with FlopCounterMode(display=False) as counter:
        Net()(torch.zeros(1, 1, 28, 28)).sum().backward()
    return counter.get_total_flops()


def limits(device: torch.device) -> dict[str, float]:
    """Images per second that arithmetic allows, by precision."""
    return {kind: matrix_rate(kind, device) / operations() for kind in TYPES}


def speed(folder: Path, name: str, *flags: object, ranks: int = 0) -> float:
    """Images per second of a script in the second of two epochs: by itself, or on ranks of one thread each."""
    script, run = scripts.write(name, folder / f"{name}.py"), runs.fresh(folder, name)
    data = write_digits(folder / "digits", train=3072, test=256)
    args = ["--data", data, "--epochs", 2, "--log-interval", 10**9, "--run-dir", run, *flags]
    args += ["--no-cuda"] if torch.cuda.device_count() < ranks else []
    how = {"ranks": ranks, "env": {"OMP_NUM_THREADS": "1"}} if ranks else {"launcher": "python"}
    with redirect_stdout(io.StringIO()):
        launch.run(script, *args, **how)
    return runs.read(run).epochs[-1]["images_per_second"]


def cost_of_ddp(data: MNIST, device: torch.device, times: int = 100) -> list[float]:
    """Measure the cost of DDP on one rank, in per cent of the time without a group, in turns."""
    gpu, kind = device.type == "cuda", "bf16" if has_bf16(device) else "float32"
    bare = Rung("bare", workers=None, layout=torch.channels_last, precision=kind)
    group = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "device_id": device if gpu else None}
    dist.init_process_group("nccl" if gpu else "gloo", **group)
    try:
        rates = trained([bare, replace(bare, name="DDP", ddp=True)], data, 64 * (200 if gpu else 3), device, times)
    finally:
        dist.destroy_process_group()
    return [100 * (one / other - 1) for one, other in zip(*rates.values(), strict=True)]


def ratios(a: Callable[[], float], b: Callable[[], float], times: int = 3) -> list[float]:
    """Measure a as a multiple of b, in turns."""
    found = in_turns({"a": a, "b": b}, times)
    return [one / other for one, other in zip(found["a"], found["b"], strict=True)]


def goals(folder: Path, data: MNIST, device: torch.device) -> list[dict]:
    """Measure what has a goal, and print a row for each."""

    def ddp(ranks: int, batch: int) -> Callable[[], float]:
        return lambda: speed(folder, "mnist_ddp", "--global-batch-size", batch, ranks=ranks)

    def saving() -> float:
        flags = "--global-batch-size", 64, "--checkpoint-every", 50
        return speed(folder, "mnist_ddp_resumable", *flags, ranks=2)

    def plain() -> float:
        return speed(folder, "mnist_single", "--precision", "float32", "--num-workers", 0)

    print(f"\n{'':<55} {'median':>8}  {'middle half':<16}   n  goal", flush=True)
    fast = ratios(lambda: speed(folder, "mnist_fast"), plain)
    return [
        row("mnist_fast / mnist_single in float32: images/s", fast, ">=", 50 if device.type == "cuda" else 4),
        row("DDP with one rank, slower than without: %", cost_of_ddp(data, device), "<=", 3),
        row("2 ranks / 1 rank, batch 64: images/s", ratios(ddp(2, 64), ddp(1, 64)), ">=", 1.5),
        row("2 ranks / 1 rank, batch 256: images/s", ratios(ddp(2, 256), ddp(1, 256)), ">=", 1.9),
        row("votes, a checkpoint each 50 steps / none: images/s", ratios(saving, ddp(2, 64)), ">=", 0.9),
    ]


def row(name: str, values: list[float], sign: str, goal: float) -> dict:
    """Print a row of the table: the median, the middle half of the values, and the goal; return the row."""
    low, middle, high = quantiles(values * 2, n=4, method="inclusive")
    met = middle <= goal if sign == "<=" else middle >= goal
    verdict = f"{sign} {goal:<5g} {'met' if met else 'MISSED'}"
    print(f"{name:<55} {middle:8.3f}  {f'{low:.3f} to {high:.3f}':<16} {len(values):3}  {verdict}", flush=True)
    return {"name": name, "median": middle, "values": values, "goal": f"{sign} {goal}", "met": met}


def step(name: str, rates: list[float], plain: float, kind: str, limit: float) -> dict:
    """Print a row of the ladder: what was seen, against the plain recipe and against the arithmetic limit."""
    low, middle, high = quantiles(rates * 2, n=4, method="inclusive")
    spread, ratio, share = f"{low:,.0f} to {high:,.0f}", middle / plain, middle / limit
    print(f"{name:<28} {middle:10,.0f}  {spread:<17} {ratio:5.2f}  {share:12.0%}", flush=True)
    found = {"name": name, "images_per_second": rates, "median": middle, "middle_half": [low, high]}
    return found | {"ratio": ratio, "precision": kind, "share_of_limit": share}


def climb(folder: Path, data: MNIST, device: torch.device, times: int = 7) -> list[dict]:
    """Measure the rungs in turns, then scripts; print the table, and return its rows."""
    ladder, most = rungs(device), limits(device)
    rates = trained(ladder, data, min(len(data), 1024 if device.type == "cpu" else 60_000), device, times)
    kinds, kind = {rung.name: rung.precision for rung in ladder}, "bf16" if has_bf16(device) else "float32"
    rates["mnist_fast"] = [speed(folder, "mnist_fast") for _ in range(3)]
    for ranks in (1, 2) if device.type == "cpu" or torch.cuda.device_count() > 1 else ():
        rates[f"DDP, ranks: {ranks}"] = [speed(folder, "mnist_ddp", ranks=ranks) for _ in range(3)]
    plain = median(rates["plain loader"])
    print(f"{'one device, rung by rung':<28} {'images/s':>10}  {'middle half':<17} ratio  of the limit")
    return [step(name, seen, plain, kinds.get(name, kind), most[kinds.get(name, kind)]) for name, seen in rates.items()]


def bench() -> None:
    """Measure every goal, print the tables, draw the ladder, write build/bench.json; one process, a quiet machine."""
    load, where = os.getloadavg()[0], stage(ROOT / "data")
    device, dataset, data = claim_device(0), check_data(where), datasets(where)[0]
    record = provenance() | {"device": str(device), "dataset": dataset, "load_before": load}
    print(f"{record['machine']}; load {load:.1f} before the start: a machine that others use misses goals")
    with tempfile.TemporaryDirectory() as name:
        record["ladder"] = climb(Path(name), data, device)
        record["rows"] = goals(Path(name), data, device)
    (ROOT / "build").mkdir(exist_ok=True)
    picture(record["ladder"], f"{dataset}, {device.type.upper()}", ROOT / "build" / "bench.png")
    (ROOT / "build" / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
    print("written: build/bench.json and build/bench.png")


def picture(rows: list[dict], where: str, path: Path) -> None:
    """Draw the ladder, and what scripts reach, into a file."""
    rates = {row["name"]: row["median"] for row in rows}
    most = {row["name"]: row["median"] / row["share_of_limit"] for row in rows}
    draw(rates, most, where, {row["name"]: row["middle_half"] for row in rows}).save(path)
