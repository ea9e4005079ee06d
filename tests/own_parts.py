"""What a learner may put in the place of the course's, for the tests of `parts=`.

Colour pictures, a network with BatchNorm, and its loss; lines as short as those of the scripts.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    """A convolution of a batch that is brought to one scale."""

    def __init__(self, channels: int, more: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, more, 3, 2), nn.BatchNorm2d(more)

    def forward(self, x: Tensor) -> Tensor:
        """Half as large, with other channels."""
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Two blocks and a linear layer; takes [n, 3, 32, 32], returns scores [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 8), Block(8, 16))
        # The averages of the last batch nearly alone: those of two ranks differ much.
        self.norm, self.fc = nn.BatchNorm1d(784, momentum=0.9), nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten classes for each picture."""
        return self.fc(self.norm(self.blocks(x).flatten(1)))


def datasets(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """512 pictures to train on, 201 to test with: much noise, and a little of their class."""
    numbers = torch.Generator().manual_seed(1)
    targets = torch.randint(10, (713,), generator=numbers)
    looks = torch.randn(10, 3, 32, 32, generator=numbers)
    pictures = 0.15 * looks[targets] + torch.randn(713, 3, 32, 32, generator=numbers)
    train = TensorDataset(pictures[:512], targets[:512])
    return train, TensorDataset(pictures[512:], targets[512:])


def loss_and_metrics(model: nn.Module, batch: list, device: torch.device) -> tuple:
    """The cross entropy of scores; how many are right, or among the best two."""
    pictures, target = (part.to(device) for part in batch)
    scores = model(pictures)
    best = scores.topk(2, dim=1).indices == target[:, None]
    counts = {"accuracy": best[:, 0].sum(), "top2": best.any(dim=1).sum(), "samples": len(target)}
    return F.cross_entropy(scores, target), counts
