"""Count the waves of a noisy signal, 1 to 4. One process for each GPU.

torchrun --standalone --nproc-per-node 2 -- signals_ddp.py --epochs 10
"""

import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it before forming the group (docs/scripts-and-jobs.md)
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def signals(count: int, seed: int) -> TensorDataset:
    """Make noisy sines of 64 values [count, 1, 64], each with 1 to 4 waves.

    The targets are the numbers of waves minus one [count].
    """
    random = torch.Generator().manual_seed(seed)
    waves, shift = torch.arange(count) % 4, torch.rand(count, 1, generator=random)
    turns = torch.linspace(0, 1, 64) * (waves[:, None] + 1) + shift
    noise = 0.5 * torch.randn(count, 64, generator=random)
    values = torch.sin(2 * torch.pi * turns) + noise
    return TensorDataset(values.unsqueeze(1), waves)


class Net(nn.Sequential):
    """Two convolutions and a mean: signals [n, 1, 64] to the four scores [n, 4]."""

    def __init__(self) -> None:
        first = nn.Conv1d(1, 16, 9, stride=2), nn.ReLU()
        second = nn.Conv1d(16, 32, 9, stride=2), nn.ReLU()
        mean = nn.AdaptiveAvgPool1d(1), nn.Flatten()
        super().__init__(*first, *second, *mean, nn.Linear(32, 4))


def main() -> None:
    """Train, test after each epoch, save the weights as signals.pt; all ranks call it."""
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    batch_help = "signals in a step, of all ranks together"
    parser.add_argument("--batch-size", type=int, default=48, help=batch_help)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    backend, gpu = "gloo", None
    if torch.cuda.is_available():
        backend, gpu = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, device_id=gpu)
    device = gpu or torch.device("cpu")

    model = Net().to(device)
    ddp_model = DDP(model)
    momentum = {"momentum": 0.9, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **momentum)
    train_set, test_set = signals(960, seed=1), signals(250, seed=2)
    sampler = DistributedSampler(train_set)
    train_batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    my_tests = range(rank, len(test_set), world_size)  # each signal on one rank
    test_batches = DataLoader(Subset(test_set, my_tests), 100)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for values, waves in train_batches:
            loss = F.cross_entropy(ddp_model(values.to(device)), waves.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.zeros((), device=device)
        for values, waves in test_batches:
            with torch.no_grad():
                guesses = model(values.to(device)).argmax(dim=1)
            right += (guesses == waves.to(device)).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right:.0f}/{len(test_set)} right", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "signals.pt")
    dist.barrier()  # srun --wait ends a rank 0 that still saves after the others exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
