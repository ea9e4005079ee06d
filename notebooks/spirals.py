"""Tell on which of three spirals a point lies. Plain PyTorch on one device: python spirals.py --epochs 10"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    """Train, test after each epoch, and save the weights to spirals.pt."""
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48, help="points in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = spirals(960, seed=1), spirals(250, seed=2)
    train_batches = DataLoader(train_set, args.batch_size, shuffle=True)
    test_batches = DataLoader(test_set, 100)

    torch.manual_seed(1)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for points, arms in train_batches:
            loss = F.cross_entropy(model(points.to(device)), arms.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for points, arms in test_batches:
                right += (model(points.to(device)).argmax(dim=1) == arms.to(device)).sum().item()
        print(f"epoch {epoch}: {right}/{len(test_set)} right", flush=True)
    torch.save(model.state_dict(), "spirals.pt")


if __name__ == "__main__":
    main()
