"""Train MNIST's network on one device at its limit: data held there, a GPU's step in one order.

python mnist_fast.py --data data --epochs 1
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchvision.datasets import MNIST

from ddp_helpers.rank.arguments import read_flags
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.fast import FastNet
from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.record import recorded, report, save_model
from ddp_helpers.rank.training import merge, set_precision

Sums = Mapping[str, Tensor]  # of a batch's samples, by name
Step = Callable[[Tensor], Sums]  # trains on the samples with these indices


def train(args: Namespace, device: torch.device, train_set: MNIST, test_set: MNIST) -> None:
    """Train for args.epochs epochs, and test after each."""
    images, labels = hold_on_device(train_set, device)
    test_images, test_labels = hold_on_device(test_set, device)
    torch.manual_seed(args.seed)
    model = FastNet().to(memory_format=torch.channels_last).to(device)
    optimizer = make_optimizer(args, device, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    order = torch.Generator(device).manual_seed(args.seed)

    def step(indices: Tensor) -> Sums:
        loss, sums = measure_batch(model, images[indices], labels[indices], args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return sums

    take_step: Step = step
    if device.type == "cuda":
        # Recorded before the first epoch's clock starts: its seconds are in no record.
        batch = torch.arange(min(args.batch_size, len(labels)), device=device)
        take_step = as_graph(step, model, optimizer, batch)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        model.train()
        shuffled = torch.randperm(len(labels), generator=order, device=device)
        batches = shuffled.split(args.batch_size)
        trained = sum_up(map(take_step, batches[:1] if args.dry_run else batches))
        middle = time.perf_counter()
        model.eval()
        with torch.no_grad():
            tested = test(model, test_images, test_labels, args)
        scheduler.step()
        end = time.perf_counter()
        report(args, epoch, trained, tested, middle - begin, end - middle)
    if args.save_model:
        save_model(model, args.run_dir)


def make_optimizer(args: Namespace, device: torch.device, model: nn.Module) -> Optimizer:
    """Make the optimizer, on a GPU such that its step can be recorded as a CUDA graph."""
    if device.type != "cuda":
        return torch.optim.Adadelta(model.parameters(), lr=args.lr)
    # A graph needs the learning rate on the device: a number would be recorded for good.
    lr = torch.tensor(args.lr, device=device)
    return torch.optim.Adadelta(model.parameters(), lr=lr, capturable=True, foreach=True)


def hold_on_device(data: MNIST, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hold all images on the device, normalised once, [n, 1, 28, 28], and all labels, [n].

    Stops at a dataset that is not MNIST: the others have no tensor of all their images.
    """
    if not isinstance(data, MNIST):
        stop(f"mnist_fast holds MNIST on the device, not a {type(data).__name__}: use mnist_ddp")
    images = data.data.to(device).float().div_(255).sub_(0.1307).div_(0.3081).unsqueeze(1)
    return images.contiguous(memory_format=torch.channels_last), data.targets.to(device)


def measure_batch(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    args: Namespace,
) -> tuple[Tensor, Sums]:
    """Compute a batch's mean loss, and the sums of its samples; nothing is copied from the CPU."""
    use_bf16 = args.precision == "bf16"
    with torch.autocast(images.device.type, torch.bfloat16, enabled=use_bf16):
        output = model(images)
        loss = F.nll_loss(output, labels)
    samples = torch.full_like(loss, len(labels), dtype=torch.float64)
    right = (output.argmax(dim=1) == labels).sum().double()
    return loss, {"loss": loss.detach() * samples, "accuracy": right, "samples": samples}


def sum_up(parts: Iterable[Sums]) -> dict[str, float]:
    """Add up what was counted, by name; this waits for the GPU."""
    sums = {name: float(value) for name, value in merge(parts).items()}
    return {**sums, "mean_data_seconds": 0.0}


def test(model: nn.Module, images: Tensor, labels: Tensor, args: Namespace) -> dict[str, float]:
    """Measure the model on all these samples, and add up."""
    size = args.test_batch_size
    batches = zip(images.split(size), labels.split(size), strict=True)
    return sum_up(measure_batch(model, inputs, target, args)[1] for inputs, target in batches)


def as_graph(step: Step, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Step:
    """Record a step once as a CUDA graph, to be played back with one order; it trains nothing.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture

    batch: indices of samples; a batch of another size is trained on without the graph.
    """
    batch = batch.clone()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up beside the main stream
        for _ in range(3):
            step(batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        sums = step(batch)
    with torch.no_grad():  # as before the warm-up; Adadelta's state begins with zeros
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
            for tensor in optimizer.state[parameter].values():
                tensor.zero_()

    def replay(indices: Tensor) -> Sums:
        if len(indices) != len(batch):
            return step(indices)  # the last, smaller batch
        batch.copy_(indices)
        graph.replay()
        return sums

    return replay


def main() -> None:
    """Check what was given, and train."""
    args = read_flags({})
    sets = datasets(args.data)
    device = pick_device(0, args.no_cuda)
    set_precision(args, device)
    with recorded(args, device, sets[0]):
        train(args, device, *sets)


if __name__ == "__main__":
    main()
