"""Put the data on disk, once, before any rank starts: staged already, downloaded, or made offline."""

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

MNIST_MD5 = {  # MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it. Stops unless all four files are whole."""
    raw = Path(root) / "MNIST" / "raw"
    try:
        sums = (raw / "MD5SUMS").read_text(errors="replace").splitlines() if (raw / "MD5SUMS").is_file() else []
        expected = {line.split()[-1]: line.split()[0] for line in sums if line.strip()} or MNIST_MD5
        for name in MNIST_MD5:
            if not (raw / name).is_file():
                cure = f"python -m ddp_helpers data {root}, or without the course download_data.py --data {root}"
                stop(f"--data {root}: {raw / name} is missing; get it once, before any rank: {cure}")
            if hashlib.md5((raw / name).read_bytes()).hexdigest() != expected.get(name):
                stop(f"--data {root}: {raw / name} is cut short or damaged (wrong MD5); remove {raw} and get it again")
    except OSError as error:
        stop(f"--data {root}: {error.filename} cannot be read ({error.strerror}): choose another folder")
    return "MNIST" if expected == MNIST_MD5 else "digits"


def is_there(root: Path) -> bool:
    """Whether any of the four files is there; whether they are whole is check_data's question."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in MNIST_MD5)


def reachable(seconds: float) -> bool:
    """Whether one of torchvision's mirrors answers."""
    for mirror in MNIST.mirrors:
        try:
            socket.create_connection((urlparse(mirror).hostname, 443), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


def download(root: Path, seconds: float) -> bool:
    """Have torchvision download MNIST into root, in a process of its own that is ended after `seconds`."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as part:
        process = get_context("spawn").Process(target=MNIST, args=(part,), kwargs={"download": True}, daemon=True)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
        if process.exitcode != 0:
            return False
        check_data(Path(part))
        if not is_there(root):
            (Path(part) / "MNIST").rename(root / "MNIST")
    return True


def stage(folder: Path = Path("data"), seconds: float = 120) -> Path:
    """The folder to give as --data, filled if need be; one process calls it, before any rank starts.

    DDP_MNIST_ROOT, where it is set, names a folder with real MNIST. Otherwise it is `folder`: with MNIST, downloaded
    if the network allows it within `seconds`, or else with the generated digits, in the same files.
    """
    if root := os.environ.get("DDP_MNIST_ROOT"):
        print(f"{check_data(Path(root))} is staged (DDP_MNIST_ROOT)")
        return Path(root)
    folder = Path(folder)
    if is_there(folder):
        print(f"{check_data(folder)} is staged")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if reachable(5) and download(folder, seconds):
        print("MNIST is downloaded")
        return folder
    print("No network: digits are made here instead of MNIST, 60,000 + 10,000 images in its file format")
    return write_digits(folder)
