"""Train MNIST's network on one device at its limit: data held there, less work, and on a GPU one order a step.

python mnist_fast.py --data data --epochs 1
"""

import time
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adadelta, Optimizer
from torch.optim.lr_scheduler import StepLR
from torchvision.datasets import MNIST

from ddp_helpers.rank.arguments import read_flags
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.record import Record
from ddp_helpers.rank.training import metrics, settle

Step = Callable[[Tensor], Tensor]


def held(data: MNIST, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hold all images on the device, normalised once, [n, 1, 28, 28], and all labels, [n]."""
    images = data.data.to(device).float().div_(255).sub_(0.1307).div_(0.3081).unsqueeze(1)
    return images.contiguous(memory_format=torch.channels_last), data.targets.to(device)


def make_step(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, args: Namespace) -> Step:
    """Make the function that trains on the images of an index, and returns [loss, right, samples, 0], as sums."""

    def step(index: Tensor) -> Tensor:
        target = labels[index]
        with torch.autocast(images.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            output = model(images[index])
            loss = F.nll_loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        n = torch.full_like(loss, len(index), dtype=torch.float64)
        return torch.stack([loss.detach() * n, (output.argmax(dim=1) == target).sum().double(), n, torch.zeros_like(n)])

    return step


def as_graph(step: Step, model: nn.Module, optimizer: Optimizer, index: Tensor) -> Step:
    """Record a step once as a CUDA graph, to be played back with one order; nothing is trained by that.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    index, weights = index.clone(), [p.detach().clone() for p in model.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up beside the main stream
        for _ in range(3):
            step(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        counted = step(index)
    with torch.no_grad():  # as before the warm-up; Adadelta's state begins with zeros
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
            for tensor in optimizer.state[parameter].values():
                tensor.zero_()

    def replay(other: Tensor) -> Tensor:
        if len(other) != len(index):
            return step(other)  # the last, smaller batch
        index.copy_(other)
        graph.replay()
        return counted

    return replay


@torch.no_grad()
def test(model: nn.Module, images: Tensor, labels: Tensor, args: Namespace) -> Tensor:
    """Count [loss, right, samples, 0] over the test set, as sums."""
    sums = torch.zeros(4, dtype=torch.float64, device=images.device)
    for some, target in zip(images.split(args.test_batch_size), labels.split(args.test_batch_size), strict=True):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            output = model(some).float()
        right = (output.argmax(dim=1) == target).sum()
        sums[:2] += torch.stack([F.nll_loss(output, target, reduction="sum"), right])
    sums[2] = len(labels)
    return sums


def train(args: Namespace, device: torch.device, train_set: MNIST, test_set: MNIST, record: Record) -> None:
    """Train for args.epochs epochs, and test after each."""
    images, labels = held(train_set, device)
    test_images, test_labels = held(test_set, device)
    torch.manual_seed(args.seed)
    model = FastNet().to(device, memory_format=torch.channels_last)
    # A GPU's graph needs the learning rate on the device: a number would be recorded for good.
    graph = {"capturable": True, "foreach": True} if device.type == "cuda" else {}
    optimizer = Adadelta(model.parameters(), lr=torch.tensor(args.lr, device=device) if graph else args.lr, **graph)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    step = make_step(model, optimizer, images, labels, args)
    order = torch.Generator(device).manual_seed(args.seed)
    if graph:
        step = as_graph(step, model, optimizer, torch.arange(args.batch_size, device=device))
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        model.train()
        trained = torch.zeros(4, dtype=torch.float64, device=device)
        for index in torch.randperm(len(labels), generator=order, device=device).split(args.batch_size):
            trained += step(index)
        trained.tolist()  # waits for the GPU
        middle = time.perf_counter()
        tested = test(model.eval(), test_images, test_labels, args)
        scheduler.step()
        record.epoch(epoch, **metrics(trained, tested, begin, middle))


def main() -> None:
    """Check what was given, and train."""
    args = read_flags()
    sets = datasets(args.data)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    env = settle(args, device, sets[0])
    with Record(args.run_dir) as record:
        record.note(spec=vars(args), env=env, status={"state": "running"})
        train(args, device, *sets, record)


if __name__ == "__main__":
    main()
