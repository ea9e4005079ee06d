"""The input pipeline of notebook 13: images as many files, one archive or shards; their rates.

The notebook calls it, in its own process, before its ranks read the files.
"""

import io
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor
from torchvision.datasets import MNIST

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, ORANGE, WIDTH
from ddp_helpers.rank.digits import write_digits

# ---- the files

_FORMS = ("files", "archive", "shards")


class _Member(NamedTuple):
    """A file to be written: its name, and its contents."""

    name: str
    content: bytes


def write_forms(folder: Path, images: int, shards: int) -> dict[str, list[Path]]:
    """Write so many digits as PNG files, as one tar file and as several tar files.

    Returns the paths of each form. A complete set is kept; one process calls it, before any rank
    reads.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".forms-", dir=folder.parent) as scratch:
            digits = MNIST(write_digits(Path(scratch), train=images, test=1)).data
            written = Path(scratch) / folder.name
            _write_all(written, [_encode_png(digit) for digit in digits], shards)
            written.rename(folder)  # all at once: a run that was interrupted leaves no half
    return {form: sorted((folder / form).iterdir()) for form in _FORMS}


def _write_all(folder: Path, images: Sequence[bytes], shards: int) -> None:
    """Write the encoded images in each of the forms, in one order."""
    for form in _FORMS:
        (folder / form).mkdir(parents=True)
    members = [_Member(f"{number:06}.png", image) for number, image in enumerate(images)]
    for member in members:
        (folder / "files" / member.name).write_bytes(member.content)
    _write_tar(folder / "archive" / "all.tar", members)
    size = -(-len(members) // shards)  # rounded up
    for shard in range(shards):
        of_shard = members[shard * size : (shard + 1) * size]
        _write_tar(folder / "shards" / f"{shard:03}.tar", of_shard)


def _write_tar(path: Path, members: Sequence[_Member]) -> None:
    """Write a tar file; without times or owners, so equal members make equal bytes."""
    with tarfile.open(path, "w") as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size = len(member.content)
            tar.addfile(info, io.BytesIO(member.content))


def _encode_png(image: Tensor) -> bytes:
    """Encode a grey image as PNG."""
    file = io.BytesIO()
    Image.fromarray(image.numpy()).save(file, "png")
    return file.getvalue()


# ---- the figure


def draw_rates(
    rates: Mapping[str, Mapping[str, float]],
    wait: float,
    where: str,
) -> Picture:
    """Draw each form's rates, and how many files an epoch opens.

    rates: for each form `cached` and `waiting`, in images/s, and `opens`; wait: seconds of an
    open() in `waiting`; where: images and machine, for the caption.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(WIDTH, 3.3), layout="constrained", sharey=True, width_ratios=(1.7, 1)
    )
    rows = range(len(rates))
    values = {
        kind: [of_form[kind] for of_form in rates.values()]
        for kind in ("cached", "waiting", "opens")
    }
    above, below = [row - 0.2 for row in rows], [row + 0.2 for row in rows]
    waiting = f"each open() waits {wait * 1e3:g} ms"
    cached_bars = left.barh(
        above, values["cached"], 0.36, color=BLUE, label="from this machine's cache"
    )
    left.bar_label(cached_bars, fmt="{:,.0f}", padding=4)
    waiting_bars = left.barh(below, values["waiting"], 0.36, color=ORANGE, label=waiting)
    left.bar_label(waiting_bars, fmt="{:,.0f}", padding=4)
    right.bar_label(right.barh(rows, values["opens"], 0.5, color=GREY), fmt="{:,.0f}", padding=4)
    left.set(xlabel="images/s, one process", yticks=rows, yticklabels=list(rates))
    right.set(xlabel="calls of open() in an epoch")
    left.invert_yaxis()
    left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _style_axes(left)
    _style_axes(right)
    cached_share = rates["files"]["cached"] / rates["archive"]["cached"]
    waiting_share = rates["files"]["waiting"] / rates["archive"]["waiting"]
    title = f"From the cache, files reach {cached_share:.0%} of the archive's rate; "
    title += f"where open() waits, {waiting_share:.0%}"
    note = "random order; the wait is a stand-in for a file server"
    return captioned(figure, title, note, where)


def _style_axes(ax: Axes) -> None:
    """Set the ticks of an axis of numbers, with room for the numbers beside its bars."""
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.locator_params(axis="x", nbins=4)
    ax.margins(x=0.3)
