"""The datasets that the scripts train on and test with.

Each script calls `datasets` on every rank, before the ranks meet. It needs torchvision.
"""

from pathlib import Path

from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

from ddp_helpers.rank.arguments import describe_damage
from ddp_helpers.rank.launchers import stop


# YOUR DATA goes here: a training and a test set of (input, target), there before the run.
# train_set.name, if there is one, is recorded.
def datasets(folder: Path) -> tuple[Dataset, Dataset]:
    """Open both datasets; every rank calls it. Stops where a file is missing or cut short."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        if defect := describe_damage(folder):
            raise ValueError(defect)
        train_set = MNIST(folder, train=True, transform=transform)
        test_set = MNIST(folder, train=False, transform=transform)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        defect = str(error) or "damaged"
        stop(f"--data {folder} holds no whole MNIST ({defect}): get it once, before the run")
    generated = (folder / "MNIST/raw/MD5SUMS").exists()  # digits, in MNIST's format
    train_set.name = "digits" if generated else "MNIST"
    return train_set, test_set
