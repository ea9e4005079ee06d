"""Tell on which of three spirals a point lies. One process for each GPU.

torchrun --standalone --nproc-per-node 2 spirals_ddp.py --epochs 10
"""

import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def spirals(count: int, seed: int) -> TensorDataset:
    """Make points [count, 2], scattered around three arms, and the number of each one's arm [count]."""
    random = torch.Generator().manual_seed(seed)
    arm, along = torch.arange(count) % 3, torch.rand(count, generator=random)
    angle = 5 * along + 2.1 * arm + 0.2 * torch.randn(count, generator=random)
    return TensorDataset(torch.stack([along * angle.cos(), along * angle.sin()], dim=1), arm)


class Net(nn.Sequential):
    """Two hidden layers; takes points [n, 2], returns the scores of the three arms [n, 3]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def main() -> None:
    """Train, test after each epoch, and save the weights to spirals.pt; every rank calls it."""
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48, help="points in a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    train_set, test_set = spirals(960, seed=1), spirals(250, seed=2)
    sampler = DistributedSampler(train_set)  # shuffles, too
    train_batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    test_batches = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), 100)  # each point on one rank

    torch.manual_seed(1)
    model = Net().to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for points, arms in train_batches:
            loss = F.cross_entropy(ddp_model(points.to(device)), arms.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.zeros((), device=device)
        with torch.no_grad():
            for points, arms in test_batches:
                right += (model(points.to(device)).argmax(dim=1) == arms.to(device)).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right:.0f}/{len(test_set)} right", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "spirals.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
