"""Have torchvision download MNIST.

`stage` and the script `download_data` call it, in one process, before any rank starts.
"""

import socket
import tempfile
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import MNIST

from ddp_helpers.data.mnist_files import check_data, has_files


def download(root: Path, seconds: float = 10) -> None:
    """Have torchvision download MNIST into root.

    Raises ConnectionError if it cannot, or a mirror sends nothing for `seconds`.
    """
    usual = socket.getdefaulttimeout()
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        socket.setdefaulttimeout(seconds)  # a network that drops packets would block it for ever
        try:
            MNIST(folder, download=True)
        except (OSError, RuntimeError, HTTPException) as error:
            raise ConnectionError(str(error)) from error
        finally:
            socket.setdefaulttimeout(usual)
        check_data(Path(folder))
        if not has_files(root):
            (Path(folder) / "MNIST").rename(root / "MNIST")
