"""The datasets that the scripts train on and test with, and the batches that the notebooks cut from them."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_helpers.rank.launchers import stop


# YOUR DATA goes here: a training and a test set of (input, target), there before the run; train_set.name is recorded.
def datasets(folder: Path) -> tuple[Dataset, Dataset]:
    """Open both datasets; a file that is missing or cut short stops the process with one line."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        train_set, test_set = (MNIST(folder, train=part, transform=transform) for part in (True, False))
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        stop(f"--data {folder} holds no whole MNIST ({error or 'damaged'}): get it once, before the run")
    train_set.name = "digits" if (folder / "MNIST/raw/MD5SUMS").exists() else "MNIST"  # generated, in MNIST's format
    return train_set, test_set


MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, where 0 is black and 1 is white


class Batches:
    """Batches of images [b, 1, 28, 28] and labels [b] on the device, in the sampler's order.

    workers=None holds all images on the device, if they fit, and prepares whole batches there; a number has that many
    DataLoader processes prepare one image at a time. After a pass, `took` is its seconds.
    """

    def __init__(self, data: MNIST, sampler: Sampler | Sequence, size: int, device: torch.device, workers: int | None):
        self.sampler, self.size, self.device, self.loader = sampler, size, device, None
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
        if workers is None and data.data.nbytes < free / 4:  # the rest is for the work
            self.images, self.labels = data.data.to(device).unsqueeze(1), data.targets.to(device)
        else:
            kept = {"pin_memory": device.type == "cuda", "persistent_workers": bool(workers)}
            kept["generator"] = torch.Generator()  # or each pass takes a number that dropout would have had
            self.loader = DataLoader(data, size, sampler=sampler, num_workers=workers or 0, **kept)

    def source(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches, untimed."""
        for images, labels in self.loader or ():
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        if not self.loader:
            for index in torch.tensor(list(self.sampler), device=self.device).split(self.size):
                yield self.images[index].float().div_(255).sub_(MEAN).div_(STD), self.labels[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin = time.perf_counter()
        yield from self.source()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # until here the work was queued, not done
        self.took = time.perf_counter() - begin
