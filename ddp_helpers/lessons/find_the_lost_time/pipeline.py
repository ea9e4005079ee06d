"""The input pipeline of notebook 12: images as many files, as one archive and as shard files, and their rates."""

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image
from torch import Tensor
from torchvision.datasets import MNIST

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, ORANGE, WIDTH
from ddp_helpers.rank.digits import write_digits

FORMS = ("files", "archive", "shards")


def write_forms(folder: Path, images: int, shards: int) -> dict[str, list[Path]]:
    """Write so many digits as PNG files, as one tar file and as several tar files, and return the paths of each form.

    A complete set is kept; one process calls it, before any rank reads.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".forms-", dir=folder.parent) as scratch:
            digits = MNIST(write_digits(Path(scratch), train=images, test=1)).data
            write_all(Path(scratch) / folder.name, [png(digit) for digit in digits], shards)
            (Path(scratch) / folder.name).rename(folder)  # all at once: a run that was interrupted leaves no half
    return {form: sorted((folder / form).iterdir()) for form in FORMS}


def write_all(folder: Path, encoded: Sequence[bytes], shards: int) -> None:
    """Write the encoded images in each of the forms, in one order."""
    for form in FORMS:
        (folder / form).mkdir(parents=True)
    named = [(f"{number:06}.png", data) for number, data in enumerate(encoded)]
    for name, data in named:
        (folder / "files" / name).write_bytes(data)
    write_tar(folder / "archive" / "all.tar", named)
    each = -(-len(named) // shards)  # rounded up
    for shard in range(shards):
        write_tar(folder / "shards" / f"{shard:03}.tar", named[shard * each : (shard + 1) * each])


def write_tar(path: Path, named: Sequence[tuple[str, bytes]]) -> None:
    """Write a tar file of these names and contents; without times or owners, so equal ones have equal bytes."""
    with tarfile.open(path, "w") as tar:
        for name, data in named:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def png(image: Tensor) -> bytes:
    """Encode a grey image as PNG."""
    file = io.BytesIO()
    Image.fromarray(image.numpy()).save(file, "png")
    return file.getvalue()


def reading_rates(found: Mapping[str, Mapping[str, float]], wait: float, where: str) -> Picture:
    """Draw each form's rates, and how many files an epoch opens.

    found: for each form `cached` and `waiting`, in images/s, and `opens`; wait: seconds of an open() in `waiting`.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(WIDTH, 3.3), layout="constrained", sharey=True, width_ratios=(1.7, 1)
    )
    rows = range(len(found))
    drawn = [
        (left, "cached", [row - 0.2 for row in rows], 0.36, BLUE, "from this machine's cache"),
        (left, "waiting", [row + 0.2 for row in rows], 0.36, ORANGE, f"each open() waits {wait * 1e3:g} ms"),
        (right, "opens", rows, 0.5, GREY, ""),
    ]
    for ax, kind, places, height, colour, label in drawn:
        values = [one[kind] for one in found.values()]
        ax.bar_label(ax.barh(places, values, height, color=colour, label=label), fmt="{:,.0f}", padding=4)
    left.set(xlabel="images/s, one process", yticks=rows, yticklabels=list(found))
    right.set(xlabel="calls of open() in an epoch")
    left.invert_yaxis()
    left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    for ax in (left, right):
        ax.tick_params(axis="y", length=0)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.locator_params(axis="x", nbins=4)
        ax.margins(x=0.3)  # room for the numbers
    cached, waiting = (found["files"][kind] / found["archive"][kind] for kind in ("cached", "waiting"))
    title = f"From the cache, files reach {cached:.0%} of the archive's rate; where open() waits, {waiting:.0%}"
    return captioned(figure, title, "random order; the wait is a stand-in for a file server", where)
