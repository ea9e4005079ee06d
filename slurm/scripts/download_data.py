"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

python download_data.py --data data
"""

from __future__ import annotations

from argparse import ArgumentParser
from http.client import HTTPException
from pathlib import Path
from torchvision.datasets import MNIST
from typing import NoReturn
import hashlib
import socket
import sys
import tempfile


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
        refuse(folder, f": no download ({error}): {cure}")
    except OSError as error:
        refuse(folder, f" cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")


# MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in MNIST_MD5)


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it.

    Stops unless all four files are whole, by their MD5.
    """
    raw = Path(root) / "MNIST" / "raw"
    try:
        digests = _read_digests(raw / "MD5SUMS") or MNIST_MD5
        for name in MNIST_MD5:
            path = raw / name
            if not path.is_file():
                refuse(
                    root,
                    f": {path} is missing; get it once, before any rank: ddp-course data {root}, "
                    f"or without the course download_data.py --data {root}",
                )
            if hashlib.md5(path.read_bytes()).hexdigest() != digests.get(name):
                problem = f": {path} is cut short or damaged (wrong MD5)"
                refuse(root, f"{problem}; remove {raw} and get it again")
    except OSError as error:
        problem = f": {error.filename} cannot be read ({error.strerror})"
        refuse(root, f"{problem}: choose another folder")
    return "MNIST" if digests == MNIST_MD5 else "digits"


def refuse(root: Path, problem: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(f"--data {root}{problem}".replace("\n", " "), file=sys.stderr, flush=True)
    sys.exit(2)


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}


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
