"""Train the Net on MNIST with one process for each GPU, and survive: stop, start again, and end with the same weights.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 mnist_ddp_resumable.py --data data --run-dir runs/mine
"""

from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler

from ddp_helpers.rank.arguments import make_parser, parse_arguments
from ddp_helpers.rank.attempt import Attempt
from ddp_helpers.rank.data import Batches, check_data, load_data
from ddp_helpers.rank.lost import lost_ranks_named
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.process_group import process_group
from ddp_helpers.rank.requeue import AttemptRecord
from ddp_helpers.rank.resume import Rest, add_resume_flags
from ddp_helpers.rank.step import Step, choose_speed
from ddp_helpers.rank.steps import Steps
from ddp_helpers.rank.topology import Topology
from ddp_helpers.rank.training import evaluate, train_epoch


def train(args: Namespace, me: Topology, device: torch.device, dataset: str) -> None:
    """Train for args.epochs epochs, and test after each."""
    train_set, test_set = load_data(args.data)
    torch.manual_seed(args.seed)  # the same first weights in every process
    model = Net().to(device, memory_format=torch.channels_last)
    torch.manual_seed(args.seed + me.rank)  # but each its own dropout
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    optimizer = Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    sampler = Rest(DistributedSampler(train_set, me.world_size, me.rank, seed=args.seed))
    attempt = Attempt(args, me, device, dataset, ddp_model, optimizer, scheduler, sampler)
    train_batches = Steps(attempt, train_set, sampler, args.batch_size, device, args.num_workers)
    test_order = range(me.rank, len(test_set), me.world_size)  # each sample once, none repeated
    test_batches = Batches(test_set, test_order, args.test_batch_size, device, args.num_workers)

    with AttemptRecord(attempt, args, me, device, dataset) as record:
        step = Step(ddp_model, optimizer, args)
        for epoch in range(attempt.progress.epoch, args.epochs + 1):
            title = f"epoch {epoch}" if record.prints else ""
            sampler.set_epoch(epoch)  # a new order each epoch
            trained = attempt.earlier + train_epoch(step, train_batches, args, title)
            tested = evaluate(model, test_batches)
            totals = torch.stack([trained, tested])
            dist.all_reduce(totals)
            record.epoch(epoch, totals, train_batches, test_batches)
            scheduler.step()
            attempt.epoch_done(epoch, last=epoch == args.epochs)
        if args.save_model and me.rank == 0:
            torch.save(model.state_dict(), (args.run_dir or Path()) / "mnist_cnn.pt")


def main() -> None:
    """Find out where this process runs, check what it was given, and train."""
    me = Topology.from_env()
    args = parse_arguments(add_resume_flags(make_parser()), me.world_size)
    device = me.device(cuda=not args.no_cuda)
    choose_speed(args, me, device)
    torch.backends.cudnn.deterministic = True  # convolutions on a GPU, the same sums in the same order each time
    dataset = check_data(args.data)
    with process_group(me, device, args.timeout) as store, lost_ranks_named(me, store):
        train(args, me, device, dataset)


if __name__ == "__main__":
    main()
