"""Count and time MNIST's Net and letters.Net, alone and on two ranks; torchrun starts it on both.

Rank 0 turns the network down, in a network namespace of its own.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import ROOT
from ddp_helpers.lessons.find_the_lost_time.dial_ranks import LIMIT
from ddp_helpers.rank import model as mnist
from ddp_helpers.tools.memory import SavedTensors

sys.path.append(str(ROOT / "notebooks"))
import letters

IMAGES, TEXTS, WIDTHS = 64, 32, (64, 128, 256, 512)  # a rank's batch; of letters.Net
RATES = 0, 1000, 300, 100  # Mbit/s, 0 for the open network


def activations(model: nn.Module, inputs: Tensor) -> int:
    """Count the bytes that a forward pass keeps for backward, but for the parameters."""
    saved = SavedTensors(model)
    with saved:
        output = model(inputs)  # while it is there, so is what it keeps
    del output
    return sum(saved.most.values())


def stepper(model: nn.Module, inputs: Tensor, target: Tensor, loss_and_metrics: Callable) -> Callable[[], list[float]]:
    """Make a function that takes a step with Adam, and returns the seconds of backward and of all."""
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> list[float]:
        began = time.perf_counter()
        loss, _ = loss_and_metrics(model(inputs), target)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return [backward - forward, time.perf_counter() - began]

    return step


def turn_down(mbit: int) -> None:
    """Limit this network to so many Mbit/s, 0 for no limit; rank 0 calls it."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL, check=False)
    if mbit:
        subprocess.run([*LIMIT, f"{mbit}mbit"], check=True)


def measure(turns: int, model: nn.Module, inputs: Tensor, target: Tensor, loss_and_metrics: Callable) -> dict:
    """Measure a model: so many turns, each a step alone and one at each rate; both ranks call it.

    Returns the least seconds of each: what else the machine does only ever adds.
    """
    found = {"parameters": sum(one.numel() for one in model.parameters()), "activations": activations(model, inputs)}
    alone = stepper(deepcopy(model), inputs, target, loss_and_metrics)
    step, taken = stepper(DDP(model), inputs, target, loss_and_metrics), []
    for _ in range(turns):
        row = {"backward": 0.0, "alone": 0.0}
        if dist.get_rank() == 0:
            row["backward"], row["alone"] = alone()
        for mbit in RATES:
            if dist.get_rank() == 0:
                turn_down(mbit)
            dist.barrier()
            row[mbit] = step()[1]
        taken.append(row)
    least = {name: min(row[name] for row in taken) for name in taken[0]}
    return found | {"backward": least.pop("backward"), "alone": least.pop("alone"), "two": least}


def main() -> None:
    """Print what was found of each model; both ranks call it."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    pictures, digits = torch.rand(IMAGES, 1, 28, 28), torch.randint(10, (IMAGES,))
    found = {"MNIST's Net": measure(10, mnist.Net(), pictures, digits, mnist.loss_and_metrics)}
    texts = letters.sentences(TEXTS, seed=1).tensors
    for width in WIDTHS:
        found[f"letters.Net({width})"] = measure(4 + 512 // width, letters.Net(width), *texts, letters.loss_and_metrics)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
