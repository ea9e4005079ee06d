"""Time a batch of training in four ways, on a network that rank 0 turns down; torchrun starts it on every rank.

Rank 0 may do so in a network namespace of its own, which `unshare -Urn` makes.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, BATCH = 3, 384, 32  # square layers, and rows a rank
MICRO_BATCHES, APPROXIMATION_RANK = 4, 4
LIMIT = ["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", "burst", "128kb", "latency", "50ms", "rate"]


def way(group: dist.ProcessGroup, hook: Callable | None = None, state: object = None, pieces: int = 1) -> Callable:
    """Make a model that is trained in one way; returns a step, which gives its seconds a batch; every rank calls it."""
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    # One bucket: of two, gloo may start PowerSGD's all-reduces in another order on each rank, and then they hang.
    model = DDP(layers, process_group=group, bucket_cap_mb=100)
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(BATCH, WIDTH)
    if hook:
        model.register_comm_hook(state, hook)

    def step() -> float:
        dist.barrier(group)
        began = time.perf_counter()
        for piece in range(1, pieces + 1):
            with nullcontext() if piece == pieces else model.no_sync():  # the last one sends for all
                model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return (time.perf_counter() - began) / pieces

    return step


def ways(group: dist.ProcessGroup) -> dict[str, Callable[[], float]]:
    """Make all ways, and warm them up: PowerSGD sends the first two steps in full; every rank calls it."""
    power = PowerSGDState(group, matrix_approximation_rank=APPROXIMATION_RANK, start_powerSGD_iter=2)
    made = {"DDP": way(group), "bf16 hook": way(group, bf16_compress_hook, group)}
    made |= {"PowerSGD": way(group, powerSGD_hook, power), "no_sync": way(group, pieces=MICRO_BATCHES)}
    for step in [*made.values()] * 4:
        step()
    return made


def seconds(made: dict[str, Callable[[], float]], steps: int) -> dict[str, float]:
    """Take so many steps of each way, by turns; returns each one's seconds a batch; every rank calls it.

    Of the steps, two or more, the lower quartile: what else the machine does only ever adds.
    """
    turns = [{name: step() for name, step in made.items()} for _ in range(steps)]
    return {name: quantiles([turn[name] for turn in turns], n=4, method="inclusive")[0] for name in made}


def main(rates: str, steps: str) -> None:
    """Print the seconds a batch of each way at each rate, Mbit/s with commas, 0 for the open network; on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made, found = ways(dist.group.WORLD), {}
    for mbit in map(int, rates.split(",")):
        if mbit and dist.get_rank() == 0:
            subprocess.run([*LIMIT, f"{mbit}mbit"], check=True)
        found[mbit] = seconds(made, int(steps) if mbit else 3 * int(steps))  # an open network is soon measured
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
