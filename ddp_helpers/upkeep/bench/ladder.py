"""The ladder of one device as a table: each rung's speed, its ratio, and its share of the arithmetic limit."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.optim import Adadelta
from torch.utils.data import DataLoader, Subset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.datasets import MNIST

from ddp_helpers.lessons.train_on_one_gpu import draw_ladder
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.scripts.mnist_fast import held
from ddp_helpers.rank.training import has_bf16, one_pass

HEAD = f"{'one device, rung by rung':<28} {'images/s':>10}  {'middle half':<17} ratio  of the limit"
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

    def trainer(self, data: MNIST, count: int, device: torch.device) -> Callable[[], float]:
        """Make a function that trains for one pass over the first images, and returns images per second."""
        model = self.net().to(device, memory_format=self.layout).train()
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


def rungs(device: torch.device) -> dict[str, Rung]:
    """The ladder from the bottom, by name, without what this device cannot do."""
    ladder = [Rung(), Rung("workers, pinned memory", workers=2), Rung("data on the device", workers=None)]
    ladder.append(replace(ladder[-1], name="channels last", layout=torch.channels_last))
    if has_bf16(device):
        ladder.append(replace(ladder[-1], name="bfloat16", precision="bf16"))
    ladder.append(replace(ladder[-1], name="less work", net=FastNet))
    return {rung.name: rung for rung in ladder}


def in_turns(trainers: dict[str, Callable[[], float]], passes: int) -> dict[str, list[float]]:
    """Images per second of each, in turns A B C, C B A, so that a busy machine slows all alike; one warms up first."""
    rates = {name: [] for name in trainers}
    for train in trainers.values():
        train()
    for turn in range(passes):
        for name in list(trainers)[:: 1 if turn % 2 == 0 else -1]:
            rates[name].append(trainers[name]())
    return rates


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
    """Multiplications and additions that training the Net needs for one image."""
    with FlopCounterMode(display=False) as counter:
        Net()(torch.zeros(1, 1, 28, 28)).sum().backward()
    return counter.get_total_flops()


def climb(data: Path, device: torch.device, passes: int = 7) -> list[dict]:
    """Measure the rungs in turns, print the table, and return its rows; one process calls it."""
    train_set, _ = datasets(data)
    count, found = min(len(train_set), 1024 if device.type == "cpu" else 60_000), rungs(device)
    rates = in_turns({name: rung.trainer(train_set, count, device) for name, rung in found.items()}, passes)
    limits = {kind: matrix_rate(kind, device) / operations() for kind in TYPES}
    print(HEAD)
    plain, kinds = median(rates["plain loader"]), {name: rung.precision for name, rung in found.items()}
    rows = [step(name, seen, plain, kinds[name], limits[kinds[name]]) for name, seen in rates.items()]
    for row in rows:
        say(row)
    return rows


def step(name: str, rates: list[float], plain: float, kind: str, limit: float) -> dict:
    """A row of the ladder: what was seen, against the plain recipe and against the arithmetic limit."""
    low, middle, high = quantiles(rates, n=4, method="inclusive")
    row = {"name": name, "images_per_second": rates, "median": middle, "middle_half": [low, high]}
    return row | {"ratio": middle / plain, "precision": kind, "share_of_limit": middle / limit}


def say(row: dict) -> None:
    """Print a row of the ladder."""
    spread = "{:,.0f} to {:,.0f}".format(*row["middle_half"])
    numbers = f"{row['ratio']:5.2f}  {row['share_of_limit']:12.0%}"
    print(f"{row['name']:<28} {row['median']:10,.0f}  {spread:<17} {numbers}", flush=True)


def of_script(name: str, rates: list[float], rows: list[dict], device: torch.device) -> dict:
    """The row of a script, beside those of the ladder."""
    kind = "bf16" if has_bf16(device) else "float32"
    same = next(row for row in rows if row["precision"] == kind)
    return step(name, rates, rows[0]["median"], kind, same["median"] / same["share_of_limit"])


def picture(rows: list[dict], where: str, path: Path) -> None:
    """Draw the ladder, and what scripts reach, into a file."""
    rates = {row["name"]: row["median"] for row in rows}
    limits = {row["name"]: row["median"] / row["share_of_limit"] for row in rows}
    draw_ladder(rates, limits, where).save(path)
