"""Check that MNIST's four files are complete.

`stage`, the script `download_data` and the doctor call it. It needs only the standard library.
"""

import hashlib
import sys
from pathlib import Path
from typing import NoReturn

# MNIST's own digests: they find damage, not forgery. A generated set has its own in MD5SUMS.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def has_files(root: Path) -> bool:
    """Return whether any of the four files exists; `check_data` checks that they are complete."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in MNIST_MD5)


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it.

    Stops unless all four files are complete, by their MD5.
    """
    raw = Path(root) / "MNIST" / "raw"
    try:
        digests = _read_digests(raw / "MD5SUMS") or MNIST_MD5
        for name in MNIST_MD5:
            path = raw / name
            if not path.is_file():
                stop(
                    f"--data {root}: {path} is missing; get it once, before any rank: "
                    f"ddp-course data {root}, "
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
    return "MNIST" if digests == MNIST_MD5 else "digits"


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}
