"""Train a network on MNIST with one process for each GPU, on any number of nodes.

torchrun --standalone --nproc-per-node 2 mnist_ddp.py --data data --epochs 1
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python mnist_ddp.py --data data   # after: export MASTER_ADDR MASTER_PORT
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python mnist_ddp.py --data data     # likewise
--batch-size counts the samples of all ranks together: the same flags mean the same training on any number of ranks.
"""

import time
from argparse import Namespace
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from ddp_helpers.rank.arguments import DDP_FLAGS, read_flags, share_batch
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.group import claim_device, gather_ranks, join, over_ranks
from ddp_helpers.rank.launchers import who_am_i
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.record import recorded, report, write
from ddp_helpers.rank.training import one_pass, set_precision


def train(args: Namespace, device: torch.device, train_set: Dataset, test_set: Dataset) -> None:
    """Train for args.epochs epochs, and test after each; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)  # repeats samples where shares differ
    test_share = Subset(test_set, range(rank, len(test_set), world_size))  # each sample on one rank, once
    loading = {"num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    loading |= {"pin_memory": device.type == "cuda", "generator": torch.Generator().manual_seed(args.seed + rank)}
    train_batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, **loading)
    test_batches = DataLoader(test_share, args.test_batch_size, **loading)
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    torch.manual_seed(args.seed + rank)  # but each rank its own dropout
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch. --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch
        model.train()
        trained = one_pass(ddp_model, train_batches, args, optimizer, title=f"epoch {epoch}" if rank == 0 else "")
        trained = over_ranks(trained)  # sums: averages over unequal shares would not add up
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's averages differ between ranks: test those that are saved
        with torch.no_grad():
            tested = one_pass(model, test_batches, args)  # not through the wrapper: no rank waits for another
        tested = over_ranks(tested)
        scheduler.step()
        if rank == 0:
            report(args, epoch, trained, tested, middle - begin, time.perf_counter() - middle)
    if args.save_model and rank == 0:
        torch.save(model.state_dict(), content := BytesIO())
        write(args.run_dir or Path(), {"mnist_cnn.pt": content.getvalue()})
        print(f"saved {args.run_dir or Path()}/mnist_cnn.pt", flush=True)


def main() -> None:
    """Find out which rank this is, check what was given, join the group, and train; every rank calls it."""
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(DDP_FLAGS)
    share_batch(args, world_size)
    sets = datasets(args.data)
    device = claim_device(local_rank, args.no_cuda)
    join(launcher, rank, world_size, device, args.timeout)
    group = gather_ranks(args, launcher, local_rank, device)
    set_precision(args, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes the record
    with recorded(args, device, sets[0], **group):
        train(args, device, *sets)
    dist.barrier()  # no rank leaves before rank 0 has saved: some launchers end all ranks when one has left
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
