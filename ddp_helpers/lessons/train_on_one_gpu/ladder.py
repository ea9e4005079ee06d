"""The ladder of notebook 01: recipes for one device, each a step faster, measured; a CUDA graph; the utilisation."""

import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Adadelta
from torch.utils.flop_counter import FlopCounterMode
from torchvision.datasets import MNIST

from ddp_helpers.rank.data import Batches
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.step import Step, record_once, train_epoch
from ddp_helpers.rank.training import has_bf16


class Graph:
    """A step as a CUDA graph, for batches of the first one's size; others are done without. One process makes it.

    It takes the place of step.take. Raises ValueError where there is no GPU.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """

    def __init__(self, step: Step) -> None:
        self.step, self.graph = step, None
        if not next(step.model.parameters()).is_cuda:
            raise ValueError("a CUDA graph needs a GPU, and this model is on a CPU")

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the captured step's outputs."""
        if not self.graph:
            self.record(images, labels)
        if images.shape != self.images.shape:
            return self.step.eager(images, labels)
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.counted

    def record(self, images: Tensor, labels: Tensor) -> None:
        """Warm up beside the main stream, put everything back as it was, and record."""
        record_once(self.step.optimizer, images.device)
        self.images, self.labels, self.graph = images.clone(), labels.clone(), torch.cuda.CUDAGraph()
        parameters = list(self.step.model.parameters())
        weights, random = [p.detach().clone() for p in parameters], torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step.eager(self.images, self.labels)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            torch._foreach_copy_(parameters, weights)
            for state in self.step.optimizer.state.values():  # made by the first of the three steps, as zeros
                torch._foreach_zero_(list(state.values()))
        torch.cuda.set_rng_state(random)
        self.step.optimizer.zero_grad()
        with torch.cuda.graph(self.graph):
            self.counted = self.step.eager(self.images, self.labels)


def as_graph(step: Step) -> Step:
    """The step, from now on played back."""
    step.take = Graph(step)
    return step


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
        flags = Namespace(precision=self.precision, compile=self.compile)
        step = Step(model, Adadelta(model.parameters(), lr=self.lr, foreach=self.foreach), flags)
        step = as_graph(step) if self.graph else step
        batches = Batches(data, order, self.batch_size, device, self.workers)

        def train() -> float:
            train_epoch(step, batches)
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
    """Measure operations per second of large matrix products, the best of all: what arithmetic can reach here."""
    best = 0.0
    for side in (256, 512, 1024, 2048) if device.type == "cpu" else (8192,):
        matrix = torch.randn(side, side, device=device).to(TYPES[precision])
        for _ in range(10):
            begin = clock(device)
            matrix @ matrix
            took = clock(device) - begin
            best = max(best, 2 * side**3 / took)
            if took > 0.3:  # some processors take minutes for a large product in bfloat16, and are no faster there
                return best
    return best


def operations() -> int:
    """Multiplications and additions that training the Net needs for one image."""
    with FlopCounterMode(display=False) as counter:
        Net()(torch.zeros(1, 1, 28, 28)).sum().backward()
    return counter.get_total_flops()


def busy(work: Callable[[], object], device: torch.device, cpus: int) -> str:
    """Repeat the work for two seconds, and say how busy the device was."""
    if device.type == "cuda":
        return busy_gpu(work, device)
    process, begin = psutil.Process(), time.perf_counter()
    before = process.cpu_times()
    for_two_seconds(work)
    used = sum(process.cpu_times()[:2]) - sum(before[:2])  # user and system
    return f"{used / (time.perf_counter() - begin):.2f} of {cpus} CPUs busy"


def busy_gpu(work: Callable[[], object], device: torch.device) -> str:
    """The same, read with nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi on this machine"
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as watcher:
        for_two_seconds(work)
        watcher.terminate()
        seen = [int(line) for line in watcher.stdout.read().split() if line.isdigit()]
    return f"GPU busy {sum(seen) / len(seen):.0f} % of the time" if seen else "nvidia-smi gives no utilisation here"


def for_two_seconds(work: Callable[[], object]) -> None:
    """Repeat the work: a reading needs a while."""
    end = time.perf_counter() + 2
    while time.perf_counter() < end:
        work()
