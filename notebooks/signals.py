"""Count the waves of a noisy signal, 1 to 4; plain PyTorch on one device.

python signals.py --epochs 10
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    """Train, test after each epoch, and save the weights to signals.pt."""
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48, help="signals in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    momentum = {"momentum": 0.9, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **momentum)
    train_batches = DataLoader(signals(960, seed=1), args.batch_size, shuffle=True)
    test_set = signals(250, seed=2)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for values, waves in train_batches:
            loss = F.cross_entropy(model(values.to(device)), waves.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = 0
        for values, waves in DataLoader(test_set, 100):
            with torch.no_grad():
                guesses = model(values.to(device)).argmax(dim=1)
            right += (guesses == waves.to(device)).sum().item()
        print(f"epoch {epoch}: {right}/{len(test_set)} right", flush=True)
    torch.save(model.state_dict(), "signals.pt")


if __name__ == "__main__":
    main()
