"""The same network with less work between its convolutions, for `mnist_fast` and notebook 01.

It needs torch; no other rank takes part in it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_helpers.rank.model import Net


class _MaskedScale(torch.autograd.Function):
    """x times a mask, whose gradient has the mask's order of memory, as a convolution needs it."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor) -> Tensor:
        """Compute the product."""
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Compute the gradient of x, and none of the mask."""
        (mask,) = ctx.saved_tensors
        return mask * gradient, None


class Dropout(nn.Dropout):
    """nn.Dropout; on a CPU it draws a random byte for each number, in an eighth of a float's time.

    p is exact if it is a multiple of 1/256, as those of the Net are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Set a share p of x's numbers to zero, and scale the others up; evaluation keeps all."""
        if not self.training or x.device.type != "cpu":
            return super().forward(x)
        integers = torch.empty(-(-x.numel() // 8), dtype=torch.int64)  # of eight bytes each
        random_bytes = integers.random_(-(2**63), None).view(torch.uint8)[: x.numel()]
        keep = random_bytes >= round(256 * self.p)
        keep = keep.as_strided(x.size(), x.stride())  # in the order of x's memory
        return _MaskedScale.apply(x, keep.to(x.dtype).div_(1 - self.p))


class FastNet(Net):
    """The course's Net, with the same scores.

    Dropout is cheaper, and ReLU has a quarter of the numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout1, self.dropout2 = Dropout(0.25), Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image: [n, 1, 28, 28] give [n, 10]."""
        x = F.relu(self.conv1(x))
        # Equal to pooling after ReLU, on a quarter of the numbers.
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)
