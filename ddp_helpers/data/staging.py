"""Put the data on disk, once, before any rank starts: staged already, downloaded, or made offline.

The driver process calls it. It needs torchvision.
"""

import os
from pathlib import Path

from ddp_helpers.data.digits import write_digits
from ddp_helpers.data.download import download
from ddp_helpers.data.mnist_files import check_data, has_files


def stage(folder: Path = Path("data")) -> Path:
    """Return the folder to give as --data, filled if necessary; one process calls it first.

    DDP_MNIST_ROOT, if set to a different folder, names a folder with real MNIST. Otherwise it is
    `folder`: with MNIST, downloaded if the network allows it, or else with the generated digits, in
    the same files. Stops if the files are not complete.
    """
    folder = Path(folder)
    root = os.environ.get("DDP_MNIST_ROOT")
    if root and Path(root).absolute() != folder.absolute():
        print(f"{check_data(Path(root))} is staged (DDP_MNIST_ROOT)")
        return Path(root)
    if has_files(folder):
        print(f"{check_data(folder)} is staged")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        download(folder)
    except ConnectionError:
        size = "60,000 + 10,000 images in its file format"
        print(f"No network: digits are made here instead of MNIST, {size}")
        return write_digits(folder)
    print("MNIST is downloaded")
    return folder
