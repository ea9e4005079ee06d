"""Put the data on disk, once, before any rank starts: staged already, downloaded, or made offline.

The learner's process calls `stage`, the script `download_data` its parts; `check_data` any rank.
It needs torchvision.
"""

import hashlib
import os
import socket
import tempfile
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlparse

from torchvision.datasets import MNIST

from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.launchers import stop

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


def _reachable(seconds: float) -> bool:
    """Tell whether one of torchvision's mirrors answers within so many seconds."""
    for mirror in MNIST.mirrors:
        try:
            host = urlparse(mirror).hostname
            socket.create_connection((host, 443), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


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


def stage(folder: Path = Path("data"), seconds: float = 120) -> Path:
    """Return the folder to give as --data, filled if need be; one process calls it, first.

    DDP_MNIST_ROOT, where it is set, names a folder with real MNIST. Otherwise it is `folder`: with
    MNIST, downloaded if the network allows it within `seconds`, or else with the generated digits,
    in the same files. Stops where there are files that are not whole.
    """
    if root := os.environ.get("DDP_MNIST_ROOT"):
        print(f"{check_data(Path(root))} is staged (DDP_MNIST_ROOT)")
        return Path(root)
    folder = Path(folder)
    if has_files(folder):
        print(f"{check_data(folder)} is staged")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if _reachable(5) and download(folder, seconds):
        print("MNIST is downloaded")
        return folder
    size = "60,000 + 10,000 images in its file format"
    print(f"No network: digits are made here instead of MNIST, {size}")
    return write_digits(folder)
