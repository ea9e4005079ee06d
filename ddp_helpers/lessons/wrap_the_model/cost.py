"""What a training step costs, part by part: data, forward and backward, communication, optimizer."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers.rank.step import Step

PARTS = ("data", "forward and backward", "communication", "optimizer")
Seconds = dict[str, float]  # of each of the PARTS


def endless(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, pass after pass."""
    while True:
        yield from batches


def parts(step: Step, batches: Iterator[tuple[Tensor, Tensor]]) -> Seconds:
    """Train one step, and say where its seconds went; every rank of the model's group calls it.

    The device is synchronised between the parts. Communication is what DDP adds to the forward and backward passes
    over the same batch inside no_sync(): waiting for slower ranks is in it, and what backward hides is not. So it is a
    difference, and negative at times: take medians over many steps.
    """
    device, wrapped = next(step.model.parameters()).device, isinstance(step.model, DDP)
    if wrapped:
        dist.barrier(step.model.process_group)  # nobody's delay from before counts
    begin = now(device)
    images, labels = next(batches)
    there = now(device)
    step.loss(images, labels)[0].backward()
    averaged = now(device)
    step.update()
    step.optimizer.zero_grad()
    end = now(device)
    passes = averaged - there
    alone = seconds_alone(step, images, labels) if wrapped else passes
    return dict(zip(PARTS, (there - begin, alone, passes - alone, end - averaged), strict=True))


def seconds_alone(step: Step, images: Tensor, labels: Tensor) -> float:
    """Seconds of forward and backward without communication; every rank of the model's group calls it."""
    dist.barrier(step.model.process_group)
    begin = now(images.device)
    with step.model.no_sync():
        step.loss(images, labels)[0].backward()
    end = now(images.device)
    step.optimizer.zero_grad()  # these gradients are this rank's own
    return end - begin


def now(device: torch.device) -> float:
    """The time at which the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(settings: Mapping[str, Callable[[], Seconds] | None], rounds: int, warm_up: int = 3) -> dict[str, Seconds]:
    """The median parts of each setting, taking turns, A B B A, so that a busy machine slows all alike.

    Every rank calls it, with the same names; one that takes no part in a setting gives None there, waits, and gets no
    entry for it. The first warm_up rounds do not count: DDP arranges its buckets in them.
    """
    seen: dict[str, list[Seconds]] = {name: [] for name, measure in settings.items() if measure}
    for number in range(warm_up + rounds):
        for name in list(settings)[:: 1 if number % 2 else -1]:
            dist.barrier()
            if name in seen:
                seen[name].append(settings[name]())
    return {name: medians(steps[warm_up:]) for name, steps in seen.items()}


def medians(steps: list[Seconds]) -> Seconds:
    """The median of each part. A communication below nothing is noise of the passes, and goes to them."""
    found = {part: median(step[part] for step in steps) for part in PARTS}
    noise = min(0.0, found["communication"])
    return found | {
        "forward and backward": found["forward and backward"] + noise,
        "communication": found["communication"] - noise,
    }
