"""The same network with less work between its convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ddp_helpers.rank.model import Net


class Scaled(torch.autograd.Function):
    """x times a mask. The gradient comes out in the order of the mask's memory, which a convolution needs it in."""

    @staticmethod
    def forward(saved: FunctionCtx, x: Tensor, mask: Tensor) -> Tensor:
        """The product."""
        saved.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(saved: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of x, and none of the mask."""
        return saved.saved_tensors[0] * gradient, None


class Dropout(nn.Dropout):
    """nn.Dropout; on a CPU it draws a random byte for each number, in an eighth of the time of a random float.

    p is exact if it is a multiple of 1/256, as those of the Net are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x with a share p of its numbers set to zero, and the others scaled up; x itself in evaluation."""
        if not self.training or x.device.type != "cpu":
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        keep = words.view(torch.uint8)[: x.numel()] >= round(256 * self.p)
        keep = keep.as_strided(x.size(), x.stride())  # in the order of x's memory
        return Scaled.apply(x, keep.to(x.dtype).div_(1 - self.p))


class FastNet(Net):
    """The course's Net, with the same scores: cheaper dropout, and ReLU on a quarter of the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout1, self.dropout2 = Dropout(0.25), Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image."""
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # equal to pooling after ReLU, on a quarter of the numbers
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)
