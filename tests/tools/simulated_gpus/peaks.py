"""Train ten models on a simulated GPU, and tell what its allocator held at most, beside what `fits` predicts.

Prints a line of JSON for each model: its name, and two numbers of bytes. The names to take are the arguments.
"""

import json
import sys
from functools import partial

import torch
from torch import nn
from torchvision import models

from ddp_helpers import ROOT
from ddp_helpers.rank.scripts.mnist_ddp import Net
from ddp_tools import fits, memory, model_file

LETTERS = model_file.load(f"{ROOT / 'notebooks' / 'letters.py'}:Net")


def mlp(width: int = 1024) -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.ReLU(), nn.Linear(width, width))]
    return nn.Sequential(nn.Linear(784, width), *hidden, nn.ReLU(), nn.Linear(width, 10))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.GRU(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.last(self.cells(x)[0])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(20000, 128), nn.Linear(128, 100)

    def forward(self, x):
        return self.last(self.words(x).mean(1))


IMAGE, WORDS = ((3, 128, 128), torch.float32), ((64,), torch.int64)
# How it is made, the shape and the type of a sample, samples in a batch, the optimizer; and the bytes of attention's
# weights: a simulated GPU computes attention step by step, and keeps for backward what fused kernels do not.
MODELS = {
    "the MNIST Net": (Net, (1, 28, 28), torch.float32, 128, "AdamW", 0),
    "linear layers": (mlp, (784,), torch.float32, 512, "AdamW", 0),
    "letters": (LETTERS, *WORDS, 32, "AdamW", 4 * 4 * 32 * 4 * 64**2),
    "letters, wide": (partial(LETTERS, width=256), *WORDS, 16, "SGD", 4 * 4 * 16 * 4 * 64**2),
    "mnasnet": (models.mnasnet0_5, *IMAGE, 8, "Adam", 0),
    "GRU": (Recurrent, (50, 64), torch.float32, 16, "AdamW", 0),
    "embedding": (Bag, (20,), torch.int64, 64, "AdamW", 0),
    "resnet18": (models.resnet18, *IMAGE, 4, "SGD", 0),
    "mobilenet": (models.mobilenet_v3_small, *IMAGE, 8, "AdamW", 0),
    "squeezenet": (models.squeezenet1_1, *IMAGE, 8, "momentum", 0),
}


def peak(make, shape, dtype, size, optimizer):
    """The most bytes that the GPU's allocator had handed out at a time, in three steps."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = make().cuda()
    stepper = fits._optimizer_named(optimizer)(list(model.parameters()))
    batch = torch.zeros(size, *shape, dtype=dtype, device="cuda")
    for _ in range(3):
        memory.loss_of(model(batch)).backward()
        stepper.step()
        stepper.zero_grad()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    for name in sys.argv[1:]:
        *case, kept = MODELS[name]
        alone = fits.predict(*case)["rows"][0]
        print(json.dumps([name, alone["peak"] + kept, peak(*case)]), flush=True)
