"""Time a batch of training in two ways, on a network whose rate rank 0 lowers.

torchrun starts it on every rank, in a network namespace of their own, which `unshare -Urn` makes:
there rank 0 may turn the network down.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, BATCH = 3, 384, 32  # square layers, and rows per rank
APPROXIMATION_RANK = 4
LIMIT = ["tc", "qdisc", "replace", "dev", "lo", "root", "tbf"]
LIMIT += ["burst", "128kb", "latency", "50ms", "rate"]

Step = Callable[[], float]  # takes a step, of one batch; returns its seconds


def _make_step(hook: Callable | None = None, state: object = None) -> Step:
    """Make a model, and the step that trains it; every rank calls both.

    hook, state: DDP's communication hook.
    """
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    # One bucket: with two, gloo may start PowerSGD's all-reduces in different orders on the ranks,
    # which then hang.
    model = DDP(layers, bucket_cap_mb=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(BATCH, WIDTH)
    if hook:
        model.register_comm_hook(state, hook)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Up to here this rank has its sums; the other may still wait for bytes on the link.
        dist.barrier()
        return time.perf_counter() - began

    return step


def make_steps() -> dict[str, Step]:
    """Make a step of each way, and take some, since PowerSGD sends the first two in full.

    Every rank calls it.
    """
    rank = APPROXIMATION_RANK
    power = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    steps = {"DDP": _make_step(), "PowerSGD": _make_step(powerSGD_hook, power)}
    for step in [*steps.values()] * 4:
        step()
    return steps


def time_steps(steps: dict[str, Step], count: int) -> dict[str, float]:
    """Take `count` steps of each way, two or more, by turns; returns each one's seconds per batch.

    That is the lower quartile: other load only ever adds time. Every rank calls it.
    """
    turns = [{way: step() for way, step in steps.items()} for _ in range(count)]
    lower_quartiles = {}
    for way in steps:
        times = [turn[way] for turn in turns]
        lower_quartiles[way] = quantiles(times, n=4, method="inclusive")[0]
    return lower_quartiles


def main(rates: str, count: str) -> None:
    """Print as JSON the seconds per batch at each rate, by way.

    Every rank calls it, rank 0 prints. rates: Mbit/s with commas, 0 for the open network; count:
    the steps of each way.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = make_steps()
    by_rate = {}
    for mbit in map(int, rates.split(",")):
        if mbit and dist.get_rank() == 0:
            subprocess.run([*LIMIT, f"{mbit}mbit"], check=True)
        # An open network is quickly measured.
        by_rate[mbit] = time_steps(steps, int(count) if mbit else 3 * int(count))
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": by_rate}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
