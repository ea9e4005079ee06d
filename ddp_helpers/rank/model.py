"""The network of the course, which is that of PyTorch's own MNIST example, and its loss.

Every script makes a `Net` on every rank; `one_pass` calls `loss_and_metrics`. It needs torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# YOUR NETWORK goes here: any nn.Module that returns log-probabilities, as log_softmax gives them;
# for plain scores put F.cross_entropy into the loss below. nll_loss would train, and learn nothing.
# BatchNorm1d fails on a batch of one sample: give train_batches drop_last=True.
class Net(nn.Module):
    """Two convolutions, two linear layers: images [n, 1, 28, 28] to log-probabilities [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


# YOUR LOSS goes here, and metrics of any name, each a tensor of one number. A metric is added up
# over the batches and the ranks, and in the end divided by the number of samples; one called
# max_NAME is the largest that any batch had. For a regression: squeeze the output to the target's
# shape first; the dict may be empty.
def loss_and_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean loss of a batch, and its metrics: accuracy counts the right answers."""
    right = output.argmax(dim=1) == target
    return F.nll_loss(output, target), {"accuracy": right.sum()}
