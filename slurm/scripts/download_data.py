"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

Written out from ddp_helpers 0.1.0, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:
python download_data.py --data data
"""

import argparse
import hashlib
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

from torchvision.datasets import MNIST


def main() -> None:
    """Download what is missing, and check what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.error = lambda message: stop(f"download_data: {message}; --help lists the flags")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that will hold MNIST/raw")
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_there(folder) and not download(folder, seconds=600):
            stop(f"--data {folder}: no network, so no download: copy MNIST/raw there from a machine that has one")
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")


def stop(line: str) -> None:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


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


if __name__ == "__main__":
    main()
# As it was written out, the SHA-256 of the lines above begins with bf390016342a4fbd
