"""Train MNIST's network on one device at its limit: data held there, less work, and on a GPU one order a step.

python mnist_fast.py --data data --epochs 1
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchvision.datasets import MNIST

from ddp_helpers.rank.arguments import read_flags
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.record import recorded, report, write
from ddp_helpers.rank.training import count_gpus, merged, set_precision


def held(data: MNIST, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hold all images on the device, normalised once, [n, 1, 28, 28], and all labels, [n]."""
    images = data.data.to(device).float().div_(255).sub_(0.1307).div_(0.3081).unsqueeze(1)
    return images.contiguous(memory_format=torch.channels_last), data.targets.to(device)


def counted(model: nn.Module, images: Tensor, labels: Tensor, args: Namespace) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean loss of a batch, and the sums of its samples by name; nothing is copied from the CPU."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        output = model(images)
        loss = F.nll_loss(output, labels)
    n = torch.full_like(loss, len(labels), dtype=torch.float64)
    right = (output.argmax(dim=1) == labels).sum().double()
    return loss, {"loss": loss.detach() * n, "accuracy": right, "samples": n}


def summed(parts: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Add up what was counted, by name; this waits for the GPU."""
    sums = {name: float(value) for name, value in merged(parts).items()}
    return sums | {"mean_data_seconds": 0.0}


def as_graph(step: Callable, model: nn.Module, optimizer: Optimizer, index: Tensor) -> Callable:
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
        sums = step(index)
    with torch.no_grad():  # as before the warm-up; Adadelta's state begins with zeros
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
            for tensor in optimizer.state[parameter].values():
                tensor.zero_()

    def replay(other: Tensor) -> dict[str, Tensor]:
        if len(other) != len(index):
            return step(other)  # the last, smaller batch
        index.copy_(other)
        graph.replay()
        return sums

    return replay


def train(args: Namespace, device: torch.device, train_set: MNIST, test_set: MNIST) -> None:
    """Train for args.epochs epochs, and test after each."""
    images, labels = held(train_set, device)
    test_images, test_labels = held(test_set, device)
    torch.manual_seed(args.seed)
    model = FastNet().to(device, memory_format=torch.channels_last)
    # A GPU's graph needs the learning rate on the device: a number would be recorded for good.
    graph = {"capturable": True, "foreach": True} if device.type == "cuda" else {}
    lr = torch.tensor(args.lr, device=device) if graph else args.lr
    optimizer = torch.optim.Adadelta(model.parameters(), lr=lr, **graph)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    order = torch.Generator(device).manual_seed(args.seed)

    def step(index: Tensor) -> dict[str, Tensor]:
        loss, sums = counted(model, images[index], labels[index], args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return sums

    whole_batch = torch.arange(min(args.batch_size, len(labels)), device=device)
    # The graph is recorded before the first epoch's clock starts: its seconds are in no record.
    take = as_graph(step, model, optimizer, whole_batch) if graph else step
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        model.train()
        indices = torch.randperm(len(labels), generator=order, device=device).split(args.batch_size)
        trained = summed(map(take, indices[:1] if args.dry_run else indices))
        middle = time.perf_counter()
        model.eval()
        with torch.no_grad():
            batches = zip(test_images.split(args.test_batch_size), test_labels.split(args.test_batch_size), strict=True)
            tested = summed(counted(model, some, target, args)[1] for some, target in batches)
        scheduler.step()
        report(args, epoch, trained, tested, middle - begin, time.perf_counter() - middle)
    if args.save_model:
        torch.save(model.state_dict(), content := BytesIO())
        write(args.run_dir or Path(), {"mnist_cnn.pt": content.getvalue()})
        print(f"saved {args.run_dir or Path()}/mnist_cnn.pt", flush=True)


def main() -> None:
    """Check what was given, and train."""
    args = read_flags({})
    sets = datasets(args.data)
    device = torch.device("cuda" if count_gpus(args.no_cuda) else "cpu")
    set_precision(args, device)
    with recorded(args, device, sets[0]):
        train(args, device, *sets)


if __name__ == "__main__":
    main()
