"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

Written out from ddp_helpers 0.1.0, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:
python download_data.py --data data
"""

import hashlib
import sys
import tempfile
from argparse import ArgumentParser
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from torchvision.datasets import MNIST


def main() -> None:
    """Download what is missing, and check what is there."""
    parser = OneLineParser(description=__doc__)
    parser.label = "download_data: "
    folder_help = "folder that will hold MNIST/raw"
    parser.add_argument("--data", type=Path, default=Path("data"), help=folder_help)
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_files(folder) and not download(folder, seconds=600):
            stop(
                f"--data {folder}: no network, so no download: "
                "copy MNIST/raw there from a machine that has one"
            )
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


class OneLineParser(ArgumentParser):
    """An ArgumentParser that reports a mistake in one line, which `label` begins."""

    label = ""

    def error(self, message: str) -> NoReturn:
        """Stop the process with the message."""
        stop(f"{self.label}{message}; --help lists the flags")


# MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
_MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it.

    Stops unless all four files are whole, by their MD5.
    """
    raw = Path(root) / "MNIST" / "raw"
    try:
        digests = _read_digests(raw / "MD5SUMS") or _MNIST_MD5
        for name in _MNIST_MD5:
            path = raw / name
            if not path.is_file():
                stop(
                    f"--data {root}: {path} is missing; get it once, before any rank: "
                    f"python -m ddp_helpers data {root}, "
                    f"or without the course download_data.py --data {root}"
                )
            if hashlib.md5(path.read_bytes()).hexdigest() != digests.get(name):
                stop(
                    f"--data {root}: {path} is cut short or damaged (wrong MD5); "
                    f"remove {raw} and get it again"
                )
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        stop(f"--data {root}: {problem}: choose another folder")
    return "MNIST" if digests == _MNIST_MD5 else "digits"


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in _MNIST_MD5)


def download(root: Path, seconds: float) -> bool:
    """Have torchvision download MNIST into root; returns whether it did.

    A process of its own does it, which is ended after so many seconds.
    """
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        spawn = get_context("spawn").Process
        process = spawn(target=MNIST, args=(folder,), kwargs={"download": True}, daemon=True)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
        if process.exitcode != 0:
            return False
        check_data(Path(folder))
        if not has_files(root):
            (Path(folder) / "MNIST").rename(root / "MNIST")
    return True


if __name__ == "__main__":
    main()
# As it was written out, the SHA-256 of the lines above begins with 192f428030bfc54d
