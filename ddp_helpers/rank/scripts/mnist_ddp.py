"""Train a network on MNIST with one process for each GPU, on any number of nodes.

torchrun --standalone --nproc-per-node 2 -- mnist_ddp.py --data data --epochs 1
# after: export MASTER_ADDR MASTER_PORT
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python mnist_ddp.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python mnist_ddp.py --data data
--batch-size counts the samples of all ranks together: the same flags mean the same training
on any number of ranks.
"""

import time
from argparse import Namespace
from collections.abc import Sized

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from ddp_helpers.rank.arguments import DDP_FLAGS, read_flags, share_batch
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.group import gather_ranks, join, over_ranks
from ddp_helpers.rank.launchers import who_am_i
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.record import recorded, report, save_model
from ddp_helpers.rank.training import one_pass, set_precision


def train(args: Namespace, device: torch.device, train_set: Dataset, test_set: Dataset) -> None:
    """Train for args.epochs epochs, and test after each; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Where shares would differ, it repeats samples.
    sampler: DistributedSampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    assert isinstance(test_set, Sized), "a stream cannot be shared out"
    test_indices = range(rank, len(test_set), world_size)  # each sample on one rank, once
    loading = {
        "num_workers": args.num_workers,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator().manual_seed(args.seed + rank),
    }
    share = args.batch_size // world_size
    train_batches = DataLoader(
        train_set,
        share,
        sampler=sampler,
        persistent_workers=args.num_workers > 0,
        **loading,
    )
    test_batches = DataLoader(Subset(test_set, test_indices), args.test_batch_size, **loading)
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    torch.manual_seed(args.seed + rank)  # but each rank its own dropout
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch.
    # --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        title = f"epoch {epoch}" if rank == 0 else ""
        sampler.set_epoch(epoch)  # a new order each epoch
        model.train()
        trained = one_pass(ddp_model, train_batches, args, optimizer, title)
        trained = over_ranks(trained)  # sums: averages over unequal shares would not add up
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            # BatchNorm's averages differ between ranks: test those that are saved.
            dist.broadcast(buffer, 0)
        with torch.no_grad():  # not through the wrapper: no rank waits for another
            tested = one_pass(model, test_batches, args)
        tested = over_ranks(tested)
        scheduler.step()
        end = time.perf_counter()
        if rank == 0:
            report(args, epoch, trained, tested, middle - begin, end - middle)
    if args.save_model and rank == 0:
        save_model(model, args.run_dir)


def main() -> None:
    """Find out which rank this is, check what was given, join the group, and train.

    Every rank calls it.
    """
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(DDP_FLAGS)
    share_batch(args, world_size)
    sets = datasets(args.data)
    device = pick_device(local_rank, args.no_cuda)
    join(launcher, rank, world_size, device, args.timeout)
    facts = gather_ranks(args, launcher, local_rank, device)
    set_precision(args, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes the record
    with recorded(args, device, sets[0], **facts):
        train(args, device, *sets)
    # No rank leaves before rank 0 has saved: some launchers end all ranks when one has left.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
