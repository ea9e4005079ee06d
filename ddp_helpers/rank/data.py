"""The datasets that the scripts train on and test with."""

from pathlib import Path

from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_helpers.rank.launchers import stop


# YOUR DATA goes here: a training set and a test set of (input, target), on disk before the run starts.
def datasets(folder: Path) -> tuple[Dataset, Dataset]:
    """Open both datasets."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    return MNIST(folder, train=True, transform=transform), MNIST(folder, train=False, transform=transform)


def open_datasets(folder: Path) -> tuple[str, Dataset, Dataset]:
    """Open both datasets, and name them; a file that is missing or cut short stops the process with one line."""
    try:
        train_set, test_set = datasets(folder)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        stop(f"--data {folder}: {error or 'damaged'}; get it once, before the run: download_data.py --data {folder}")
    made = (folder / "MNIST/raw/MD5SUMS").exists()  # the course's digits, in MNIST's file format
    return "digits" if made else type(train_set).__name__, train_set, test_set
