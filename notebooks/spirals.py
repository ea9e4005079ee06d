"""Classify points by their spiral, one of three. Plain PyTorch on one device.

python spirals.py --epochs 10
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def spirals(count: int, seed: int) -> TensorDataset:  # YOUR DATA: (input, target)
    """Scatter points [count, 2] around three arms; the targets are their arms [count]."""
    generator = torch.Generator().manual_seed(seed)
    arm, radius = torch.arange(count) % 3, torch.rand(count, generator=generator)
    angle = 5 * radius + 2.1 * arm + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.view_as_real(torch.polar(radius, angle)), arm)


def main() -> None:
    """Train, test after each epoch, and save the weights to --save."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=48, help="samples in a step")
    add("--lr", type=float, default=0.1)
    add("--save", type=Path, help="a new file, for the weights")
    args = parser.parse_args()
    if args.save and (args.save.exists() or not args.save.parent.is_dir()):
        parser.exit(2, f"--save {args.save}: give a new file in a folder that exists\n")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = spirals(960, seed=1), spirals(250, seed=2)
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_batches = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_batches = DataLoader(test_set, 100)
    torch.manual_seed(1)  # the same first weights each time
    hidden = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(64, 3)).to(device)  # YOUR NETWORK
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)  # YOUR OPTIMIZER
    for epoch in range(1, args.epochs + 1):
        sampler.generator.manual_seed(epoch)  # a new order
        model.train()
        for x, y in train_batches:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))  # YOUR LOSS
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.tensor(0, device=device)
        with torch.no_grad():
            for x, y in test_batches:
                right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        print(f"epoch {epoch}: {right}/{len(test_set)} right", flush=True)
    if args.save:
        torch.save(model.cpu().state_dict(), args.save)


if __name__ == "__main__":
    main()
