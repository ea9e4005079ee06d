"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

python download_data.py --data data
"""

import socket
import tempfile
from argparse import ArgumentParser
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import MNIST

from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.mnist_files import MNIST_MD5, check_data


def main() -> None:
    """Download what is missing, and check what is there."""
    parser = ArgumentParser(usage="%(prog)s [--data FOLDER]", description=__doc__)
    folder_help = "folder that will hold MNIST/raw"
    parser.add_argument("--data", type=Path, default=Path("data"), help=folder_help)
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_files(folder):
            download(folder)
    except ConnectionError as error:
        cure = "copy MNIST/raw there from a machine that has a network"
        stop(f"--data {folder}: no download ({error}): {cure}")
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in MNIST_MD5)


def download(root: Path, seconds: float = 10) -> None:
    """Have torchvision download MNIST into root.

    Raises ConnectionError where it cannot, or where a mirror says nothing for so many seconds.
    """
    usual = socket.getdefaulttimeout()
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        socket.setdefaulttimeout(seconds)  # a network that drops packets would hold it for ever
        try:
            MNIST(folder, download=True)
        except (OSError, RuntimeError, HTTPException) as error:
            raise ConnectionError(str(error)) from error
        finally:
            socket.setdefaulttimeout(usual)
        check_data(Path(folder))
        if not has_files(root):
            (Path(folder) / "MNIST").rename(root / "MNIST")


if __name__ == "__main__":
    main()
