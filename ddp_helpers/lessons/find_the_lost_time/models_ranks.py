"""Time MNIST's Net and letters.Net, alone and on two ranks, on a network turned down.

torchrun starts it on both ranks, in a network namespace of their own, for `models`: there rank 0
may turn the network down. It prints the JSON that becomes the record.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import ROOT
from ddp_helpers.lessons.find_the_lost_time.dial_ranks import LIMIT
from ddp_helpers.rank.scripts import mnist_ddp as mnist

sys.path.append(str(ROOT / "notebooks"))
import letters

IMAGES, TEXTS = 64, 32  # a rank's batch: of MNIST's Net, of letters.Net
WIDTHS = (64, 512)  # of letters.Net
RATES = (0, 1000, 300, 100)  # Mbit/s, 0 for the open network

LossAndMetrics = Callable[..., tuple[Tensor, object]]


class StepTime(NamedTuple):
    """The seconds of a training step, and of the backward pass in it."""

    backward: float
    step: float


class Task(NamedTuple):
    """A batch of inputs and targets, and the function that makes a loss of a model and a batch."""

    inputs: Tensor
    target: Tensor
    loss_and_metrics: LossAndMetrics


def make_step(model: nn.Module, task: Task) -> Callable[[], StepTime]:
    """Make a function that takes a step with Adam and returns its times.

    On every rank of the model: a replica of DDP all-reduces.
    """
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> StepTime:
        began = time.perf_counter()
        batch = [task.inputs, task.target]
        loss, _ = task.loss_and_metrics(model, batch, task.inputs.device)
        forward_end = time.perf_counter()
        loss.backward()
        backward_end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return StepTime(backward_end - forward_end, time.perf_counter() - began)

    return step


def turn_down(mbit: int) -> None:
    """Limit this network to so many Mbit/s, 0 for no limit; rank 0 calls it."""
    open_again = ["tc", "qdisc", "del", "dev", "lo", "root"]
    subprocess.run(open_again, stderr=subprocess.DEVNULL, check=False)
    if mbit:
        subprocess.run([*LIMIT, f"{mbit}mbit"], check=True)


def _until_all_have_stepped(step: Callable[[], StepTime]) -> float:
    """Return the seconds until both ranks have taken a step; both ranks call it.

    A rank may have its sums while bytes for the other are still on the link.
    """
    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began


def measure(turns: int, model: nn.Module, task: Task) -> dict:
    """Measure a model: so many turns, each a step alone and one at each rate; both ranks call it.

    Returns the least seconds of each (what else the machine does only ever adds), with the keys
    of the record. On rank 1, which takes no step alone, these are 0.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step_alone = make_step(deepcopy(model), task)
    step = make_step(DDP(model), task)
    is_rank_0 = dist.get_rank() == 0
    alone: list[StepTime] = []
    two: dict[int, list[float]] = {mbit: [] for mbit in RATES}
    for _ in range(turns):
        alone.append(step_alone() if is_rank_0 else StepTime(0.0, 0.0))
        for mbit in RATES:
            if is_rank_0:
                turn_down(mbit)
            two[mbit].append(_until_all_have_stepped(step))
    least = {
        "backward": min(times.backward for times in alone),
        "alone": min(times.step for times in alone),
        "two": {mbit: min(seconds) for mbit, seconds in two.items()},
    }
    return {"parameters": parameters} | least


def main() -> None:
    """Measure each model; rank 0 prints the results as JSON; both ranks call it."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    images, digits = torch.rand(IMAGES, 1, 28, 28), torch.randint(10, (IMAGES,))
    classify = Task(images, digits, mnist.loss_and_metrics)
    results = {"MNIST's Net": measure(30, mnist.Net(), classify)}
    texts, following = letters.sentences(TEXTS, seed=1).tensors
    predict = Task(texts, following, letters.loss_and_metrics)
    for width in WIDTHS:
        turns = 4 + 512 // width
        results[f"letters.Net({width})"] = measure(turns, letters.Net(width), predict)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
