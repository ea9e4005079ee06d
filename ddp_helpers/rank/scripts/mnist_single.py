"""Train the Net on MNIST with one process, on one GPU or on the CPU.

python mnist_single.py --data data --epochs 1
"""

from argparse import Namespace
from pathlib import Path

import torch
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import RandomSampler

from ddp_helpers.rank.arguments import make_parser, parse_arguments
from ddp_helpers.rank.data import Batches, check_data, load_data
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.record import Record
from ddp_helpers.rank.step import Step, choose_speed
from ddp_helpers.rank.topology import Topology, stop
from ddp_helpers.rank.training import evaluate, train_epoch


def train(args: Namespace, me: Topology, device: torch.device, dataset: str) -> None:
    """Train for args.epochs epochs, and test after each."""
    train_set, test_set = load_data(args.data)
    torch.manual_seed(args.seed)  # the same first weights in every process
    model = Net().to(device, memory_format=torch.channels_last)
    torch.manual_seed(args.seed + me.rank)  # but each its own dropout
    optimizer = Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_batches = Batches(train_set, sampler, args.batch_size, device, args.num_workers)
    test_order = range(len(test_set))
    test_batches = Batches(test_set, test_order, args.test_batch_size, device, args.num_workers)

    with Record(args, me, device, dataset) as record:
        step = Step(model, optimizer, args)
        for epoch in range(1, args.epochs + 1):
            title = f"epoch {epoch}" if record.prints else ""
            sampler.generator.manual_seed(args.seed + epoch)  # a new order each epoch
            trained = train_epoch(step, train_batches, args, title)
            tested = evaluate(model, test_batches)
            totals = torch.stack([trained, tested])
            record.epoch(epoch, totals, train_batches, test_batches)
            scheduler.step()
        if args.save_model and me.rank == 0:
            torch.save(model.state_dict(), (args.run_dir or Path()) / "mnist_cnn.pt")


def main() -> None:
    """Find out where this process runs, check what it was given, and train."""
    me = Topology.from_env()
    if me.world_size > 1:
        stop(f"mnist_single is one process, but {me.launcher} started {me.world_size}: use mnist_ddp")
    args = parse_arguments(make_parser(), me.world_size)
    device = me.device(cuda=not args.no_cuda)
    choose_speed(args, me, device)
    dataset = check_data(args.data)
    train(args, me, device, dataset)


if __name__ == "__main__":
    main()
