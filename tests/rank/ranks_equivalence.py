"""What every rank does for tests/rank/test_equivalence.py; started with torchrun, it prints one line of JSON per rank.

All is small and on the CPU, with a fixed seed: 24 samples of 6 numbers, two layers without dropout, and plain SGD.
"""

import json

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

SAMPLES, STEPS, MICRO = 24, 3, 3


def new_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def all_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return images, torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model: nn.Module, index: list[int], after_backward=lambda: None) -> Tensor:
    """STEPS steps of SGD on these samples; the weights after it."""
    (images, targets), optimizer = all_data(), torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((model(images[index]) - targets[index]) ** 2).mean().backward()
        after_backward()
        optimizer.step()
    return parameters(model)


def by_hand(index: list[int], average: bool) -> Tensor:
    """DDP in three lines: add up every gradient over the ranks, and divide by their number."""
    model = new_model()

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() if average else 1

    return train(model, index, reduce)


def accumulated(index: list[int], divide: bool) -> Tensor:
    """As train(), but each step's samples in MICRO parts, with one all-reduce at the last."""
    model = DDP(new_model())
    (images, targets), optimizer = all_data(), torch.optim.SGD(model.parameters(), lr=0.5)
    parts = torch.tensor(index).chunk(MICRO)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for part in parts[:-1]:
                (((model(images[part]) - targets[part]) ** 2).mean() / (MICRO if divide else 1)).backward()
        (((model(images[parts[-1]]) - targets[parts[-1]]) ** 2).mean() / (MICRO if divide else 1)).backward()
        optimizer.step()
    return parameters(model)


def replicas(weights: Tensor) -> list[bool]:
    """For each rank: whether its weights are those of rank 0, to the bit."""
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    return [bool(torch.equal(one, everyone[0])) for one in everyone]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = list(range(rank, SAMPLES, world_size))
    one = train(new_model(), list(range(SAMPLES)))  # what one process would get from all samples
    real = train(DDP(new_model()), mine)
    same_shard = train(DDP(new_model()), list(range(0, SAMPLES, world_size)))
    perturbed = real.clone()
    perturbed[0] += 1e-15 * abs(perturbed[0]) + 1e-15 if rank == world_size - 1 else 0
    differences = {
        "ddp - one process": real - one,
        "same shard everywhere - one process": same_shard - one,
        "by hand - ddp": by_hand(mine, average=True) - real,
        "by hand, not averaged - ddp": by_hand(mine, average=False) - real,
        "no_sync - one big batch": accumulated(mine, divide=True) - real,
        "no_sync, not divided - one big batch": accumulated(mine, divide=False) - real,
    }
    differences = {name: difference.abs().max().item() for name, difference in differences.items()}
    differences |= {"replicas": replicas(real), "perturbed replicas": replicas(perturbed)}
    print(json.dumps(differences), flush=True)
    dist.barrier()  # nobody leaves while a peer still needs an answer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
