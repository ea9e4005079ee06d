"""The plain recipe, as PyTorch's own MNIST example has it: what the course's speed is measured against.

python -m ddp_helpers.upkeep.plain DATA: two passes over the training set; prints the images per
second of the second.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch.optim import Adadelta
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_helpers.rank.model import Net


def main() -> None:
    """One image at a time through a DataLoader without workers, float32, nothing else."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = MNIST(sys.argv[1], train=True, transform=Compose([ToTensor(), Normalize((0.1307,), (0.3081,))]))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = Net().to(device)
    optimizer = Adadelta(model.parameters(), lr=1.0)
    for _ in range(2):
        begin = time.perf_counter()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()  # waits for a GPU to be done
    print(len(data) / (time.perf_counter() - begin))


if __name__ == "__main__":
    main()
