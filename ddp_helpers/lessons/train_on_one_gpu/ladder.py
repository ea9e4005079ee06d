"""The ladder of one device: the same training, each rung with one thing changed, and how fast each is."""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Adadelta
from torch.utils.flop_counter import FlopCounterMode
from torchvision.datasets import MNIST

from ddp_helpers.lessons.train_on_one_gpu.graph import as_graph
from ddp_helpers.rank.batches import Batches
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.step import Step, train_epoch
from ddp_helpers.rank.training import has_bf16

QUIET = {"log_interval": 1, "dry_run": False}  # what train_epoch asks of the flags, besides the speed
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rung:
    """A recipe. Each of its fields is one change from the plain one, which these defaults are."""

    name: str = "plain loader"
    workers: int | None = 0  # DataLoader processes; None holds the data on the device
    layout: torch.memory_format = torch.contiguous_format
    precision: str = "float32"
    net: type[nn.Module] = Net
    foreach: bool | None = None  # all tensors in one call of the optimizer; None is torch's choice: on a GPU
    compile: bool = False
    graph: bool = False
    batch_size: int = 64
    lr: float = 1.0

    def trainer(self, data: MNIST, order: list[int], device: torch.device) -> Callable[[], float]:
        """A function that trains for one pass over these images, and returns images per second."""
        torch.manual_seed(1)
        model = self.net().to(device, memory_format=self.layout)
        flags = Namespace(precision=self.precision, compile=self.compile, **QUIET)
        step = Step(model, Adadelta(model.parameters(), lr=self.lr, foreach=self.foreach), flags)
        step = as_graph(step) if self.graph else step
        batches = Batches(data, order, self.batch_size, device, self.workers)

        def train() -> float:
            train_epoch(step, batches, flags, "")
            return len(order) / batches.took

        return train


def rungs(device: torch.device, workers: int = 2, large: int = 256) -> dict[str, Rung]:
    """The ladder from the bottom, by name, without what this device cannot do. Each rung keeps what helps below it."""
    gpu = device.type == "cuda"
    ladder = [Rung(), Rung("workers, pinned memory", workers=workers), Rung("data on the device", workers=None)]
    ladder.append(replace(ladder[-1], name="channels last", layout=torch.channels_last))
    if has_bf16(device):
        ladder.append(replace(ladder[-1], name="bfloat16", precision="bf16"))
    ladder.append(replace(ladder[-1], name="the same with less work", net=FastNet))
    if gpu:
        ladder.append(replace(ladder[-1], name="CUDA graph", graph=True))
    else:
        ladder.append(replace(ladder[-1], name="foreach optimizer", foreach=True))
    ladder.append(
        replace(ladder[-1], name="compiled" if gpu else "compiled optimizer", foreach=None, compile=True, graph=False)
    )
    # Fewer steps, each longer by the square root: what that is worth is recorded in notebooks/results/accuracy.
    ladder.append(replace(ladder[-1], name=f"batch size {large}", batch_size=large, lr=(large / 64) ** 0.5))
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


def clock(device: torch.device) -> float:
    """The time, when all work given to the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def matrix_rate(precision: str, device: torch.device) -> float:
    """Operations per second of a large matrix product, the best of ten: what arithmetic can reach here."""
    side, best = (2048 if device.type == "cpu" else 8192), 0.0
    matrix = torch.randn(side, side, device=device).to(TYPES[precision])
    for _ in range(10):
        begin = clock(device)
        matrix @ matrix
        best = max(best, 2 * side**3 / (clock(device) - begin))
    return best


def operations() -> int:
    """Multiplications and additions that training the Net needs for one image."""
    with FlopCounterMode(display=False) as counter:
        Net()(torch.zeros(1, 1, 28, 28)).sum().backward()
    return counter.get_total_flops()
