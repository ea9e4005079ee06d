"""The datasets that the scripts train on and test with."""

from pathlib import Path

from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_helpers.rank.arguments import damage
from ddp_helpers.rank.launchers import stop


# YOUR DATA goes here: a training and a test set of (input, target), there before the run; train_set.name is recorded.
def datasets(folder: Path) -> tuple[Dataset, Dataset]:
    """Open both datasets; a file that is missing or cut short stops the process with one line."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        if wrong := damage(folder):
            raise ValueError(wrong)
        train_set, test_set = (MNIST(folder, train=part, transform=transform) for part in (True, False))
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        stop(f"--data {folder} holds no whole MNIST ({error or 'damaged'}): get it once, before the run")
    train_set.name = "digits" if (folder / "MNIST/raw/MD5SUMS").exists() else "MNIST"  # generated, in MNIST's format
    return train_set, test_set


MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, where 0 is black and 1 is white
