"""The images of notebook 13: the same digits as many files, as one archive and as shards.

The notebook calls it, in the driver process, before its ranks read the files.
"""

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torchvision.datasets import MNIST

from ddp_helpers.data.digits import write_digits


def write_forms(folder: Path, images: int, shards: int) -> dict[str, list[Path]]:
    """Write `images` digits as PNG files, as one tar file and as several tar files.

    Returns the paths of each form. The folder's old contents are deleted; one process calls it,
    before any rank reads.
    """
    shutil.rmtree(folder, ignore_errors=True)
    forms = {form: folder / form for form in ("files", "archive", "shards")}
    for form in forms.values():
        form.mkdir(parents=True)
    digits = MNIST(write_digits(folder / "mnist", train=images, test=1)).data
    files = [forms["files"] / f"{number:06}.png" for number in range(images)]
    for file, digit in zip(files, digits, strict=True):
        Image.fromarray(digit.numpy()).save(file)
    _write_tar(forms["archive"] / "all.tar", files)
    size = -(-images // shards)  # rounded up
    for shard in range(shards):
        _write_tar(forms["shards"] / f"{shard:03}.tar", files[shard * size : (shard + 1) * size])
    return {form: sorted(path.iterdir()) for form, path in forms.items()}


def _write_tar(path: Path, files: Sequence[Path]) -> None:
    """Put files into a tar file, by their names."""
    with tarfile.open(path, "w") as tar:
        for file in files:
            tar.add(file, arcname=file.name)
