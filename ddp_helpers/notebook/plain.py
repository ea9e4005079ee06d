"""The plain recipe, as PyTorch's own MNIST example has it: what the course's speed is measured against.

python -m ddp_helpers.notebook.plain DATA: two passes over the training set; prints the images per second of the second.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adadelta
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor


class Net(nn.Module):
    """The network as the example writes it: the course's Net is the same function, with less work."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten digits for each image."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


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
