"""Train a network on MNIST, on one GPU or on the CPU.

python mnist_single.py --data data --epochs 1
"""

import time
from argparse import Namespace
from collections.abc import Sized

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from ddp_helpers.rank.arguments import read_flags
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.record import recorded, report, save_model
from ddp_helpers.rank.training import one_pass, set_precision


def train(args: Namespace, device: torch.device, train_set: Dataset, test_set: Dataset) -> None:
    """Train for args.epochs epochs, and test after each."""
    assert isinstance(train_set, Sized), "a stream has no order to draw"
    sampler = RandomSampler(train_set, generator=torch.Generator())
    loading = {
        "num_workers": args.num_workers,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator().manual_seed(args.seed),
    }
    train_batches = DataLoader(
        train_set,
        args.batch_size,
        sampler=sampler,
        persistent_workers=args.num_workers > 0,
        **loading,
    )
    test_batches = DataLoader(test_set, args.test_batch_size, **loading)
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch.
    # --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        sampler.generator.manual_seed(args.seed + epoch)  # a new order each epoch
        model.train()
        trained = one_pass(model, train_batches, args, optimizer, f"epoch {epoch}")
        middle = time.perf_counter()
        model.eval()
        with torch.no_grad():
            tested = one_pass(model, test_batches, args)
        scheduler.step()
        end = time.perf_counter()
        report(args, epoch, trained, tested, middle - begin, end - middle)
    if args.save_model:
        save_model(model, args.run_dir)


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
