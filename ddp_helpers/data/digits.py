"""An offline stand-in for MNIST: hand-drawn-looking digits in MNIST's own file format.

One process calls `write_digits` before any rank starts. It needs torch.
"""

import hashlib
import struct
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["FILES", "write_digits"]

_SIDE = 28  # pixels along each side of an image, as in MNIST
_DOTS = 64  # ink dots along the strokes of one digit: about a pixel apart or less
_CHUNK = 500  # images drawn at once: few enough to stay in the processor's cache
_KINDS = ("images-idx3", "labels-idx1")
FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in _KINDS]

# Two or three ways to draw each digit. "10 70 39" is one stroke from x=1 y=0 through x=7 y=0 to
# x=3 y=9, with y pointing down; a comma lifts the pen, and a point given twice makes a sharper
# corner.
_STYLES = {
    0: ["50 30 11 17 39 59 77 71 50", "61 50 30 12 17 39 59 77 72 50 30"],
    1: ["50 49", "32 50 50 59", "32 50 50 59,29 89"],
    2: ["12 11 30 60 72 64 19 19 89", "12 30 60 72 55 28 17 26 48 88", "12 30 60 83 64 28 29 89"],
    3: ["11 30 60 72 63 44 44 65 77 59 29 17", "10 70 70 44 44 75 77 59 29 17"],
    4: ["30 15 15 85,60 69", "60 16 16 86,60 59", "20 13 35 75,71 74 69"],
    5: ["80 20 20 14 44 75 77 59 29 18", "20 24 54 75 77 59 29 18,20 80"],
    6: ["60 31 13 17 39 59 77 75 54 34 16", "50 23 16 28 59 78 65 45 17"],
    7: ["10 70 70 39", "10 80 80 49,24 74", "12 10 10 80 80 55 49"],
    8: ["71 50 20 12 34 64 77 69 39 17 35 54 73 71", "40 12 14 54 73 60 40,44 15 18 49 78 75 44"],
    9: [
        "72 50 20 12 15 45 74 72 69",
        "72 50 20 12 15 45 74 72 77 59 29",
        "71 30 12 15 45 72 71 71 59",
    ],
}
_SLOTS = 6  # styles of each digit to draw from: two styles and three styles both fill six evenly


def _round_corners(line: Tensor) -> Tensor:
    """Cut a line's corners twice, after Chaikin: a hand does not draw sharp ones; [n, 2]."""
    for _ in range(2):
        starts, ends = line[:-1], line[1:]
        quarters = [0.75 * starts + 0.25 * ends, 0.25 * starts + 0.75 * ends]
        inner = torch.stack(quarters, dim=1).flatten(0, 1)
        line = torch.cat([line[:1], inner, line[-1:]])
    return line


def _read_stroke(stroke: str) -> Tensor:
    """Read a stroke's points, such as "10 70 39", as [n, 2], in -1 to 1."""
    points = [[float(point[0]), float(point[1])] for point in stroke.split()]
    return torch.tensor(points) / 4.5 - 1


def _trace(style: str) -> Tensor:
    """Place _DOTS points evenly along a style's strokes: [_DOTS, 2], in -1 to 1."""
    strokes = [_round_corners(_read_stroke(stroke)) for stroke in style.split(",")]
    starts = torch.cat([stroke[:-1] for stroke in strokes])
    ends = torch.cat([stroke[1:] for stroke in strokes])
    lengths = (ends - starts).norm(dim=1)
    distances = lengths.cumsum(0)  # along the pen's way, at the end of each segment
    wanted = torch.linspace(0, distances[-1].item(), _DOTS)
    segment = torch.searchsorted(distances, wanted).clamp(max=len(lengths) - 1)
    fraction = (wanted - distances[segment] + lengths[segment]) / lengths[segment]
    return torch.lerp(starts[segment], ends[segment], fraction[:, None])


def _pen_paths(styles: Tensor, generator: Generator) -> Tensor:
    """Vary each style as different writers do: [n, _DOTS, 2], from -1 to 1 into pixels."""

    def vary(*shape: int) -> Tensor:
        return 2 * torch.rand(len(styles), *shape, generator=generator) - 1

    # Most writers are neat, a few are careless: without those few, a small network would make
    # no mistake.
    mess = 0.4 + 1.4 * torch.rand(len(styles), 1, 1, generator=generator) ** 6
    # A long stroke has room to wobble.
    length = styles.diff(dim=1).norm(dim=2).sum(dim=1)[:, None, None]
    wobble = F.interpolate(vary(2, 7), size=_DOTS, mode="linear", align_corners=True)
    wobble = F.avg_pool1d(wobble, 9, stride=1, padding=4, count_include_pad=False)
    path = styles + 0.06 * mess * length * wobble.transpose(1, 2)
    # A smooth bend.
    path = path + 0.17 * mess * torch.sin(2 * vary(1, 2) * path.flip(2) + 3 * vary(1, 2))
    x, y = path.unbind(2)
    angle, slant = 0.25 * vary(1), 0.15 + 0.3 * vary(1)
    x, y = (8.8 + 1.8 * vary(1)) * (x - slant * y), (9 + vary(1)) * y
    turned = [angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y]
    path = torch.stack(turned, dim=2)
    # Centred by mass, as in MNIST; the shift compensates for these writers' smaller variety.
    centred = path - path.mean(dim=1, keepdim=True) + (_SIDE - 1) / 2
    return centred + 1.8 * vary(1, 2)


def _draw(paths: Tensor, generator: Generator) -> Tensor:
    """Draw an image for each pen path: [n, _SIDE, _SIDE] of uint8, white ink on black."""
    pixels = torch.arange(_SIDE)
    x, y = ((axis[:, :, None] - pixels) ** 2 for axis in paths.unbind(2))
    nearest = torch.full((len(paths), _SIDE, _SIDE), torch.inf)  # dot, as a squared distance
    for dot in range(_DOTS):
        torch.minimum(nearest, x[:, dot, None, :] + y[:, dot, :, None], out=nearest)
    thickness, strength = torch.rand(2, len(paths), 1, 1, generator=generator)
    depth = 0.8 + 0.9 * thickness - nearest.sqrt()  # pixels inwards from the edge of the ink
    ink = (0.5 + 1.5 * depth).clamp(0, 1) * (0.85 + 0.15 * strength)
    return (255 * ink).to(torch.uint8)


def _idx_file(magic: int, *sizes: int) -> tuple[bytearray, Tensor]:
    """Make an empty file in IDX, MNIST's format, and the uint8 tensor that is its body."""
    header = struct.pack(f">{1 + len(sizes)}I", magic, *sizes)
    content = bytearray(header + bytes(torch.Size(sizes).numel()))
    body = torch.frombuffer(content, dtype=torch.uint8, offset=len(header))
    return content, body.view(sizes)


def _make_set(size: int, generator: Generator) -> tuple[bytearray, bytearray]:
    """Make the image file and the label file of a set of `size` digits."""
    slots = [
        torch.stack([_trace(styles[slot % len(styles)]) for slot in range(_SLOTS)])
        for styles in _STYLES.values()
    ]
    traces = torch.stack(slots)  # [10, _SLOTS, _DOTS, 2]
    image_file, images = _idx_file(2051, size, _SIDE, _SIDE)
    label_file, labels = _idx_file(2049, size)
    labels.copy_(torch.randint(10, (size,), generator=generator))
    for image_chunk, label_chunk in zip(images.split(_CHUNK), labels.split(_CHUNK), strict=True):
        slot = torch.randint(_SLOTS, (len(label_chunk),), generator=generator)
        paths = _pen_paths(traces[label_chunk.long(), slot], generator)
        image_chunk.copy_(_draw(paths, generator))
    return image_file, label_file


def _make_both(train: int, test: int, seed: int) -> list[bytearray]:
    """Make the contents of FILES: the training set, then the test set."""
    generator = torch.Generator().manual_seed(seed)  # torch's own generator stays unchanged
    threads = torch.get_num_threads()
    # The work is many short steps: on a busy machine, several threads would mostly wait for one
    # another.
    torch.set_num_threads(1)
    try:
        return [*_make_set(train, generator), *_make_set(test, generator)]
    finally:
        torch.set_num_threads(threads)


def _is_complete(root: Path) -> bool:
    """Return whether root has a digits set; it appears atomically, so the file names suffice."""
    raw = root / "MNIST" / "raw"
    return all((raw / name).is_file() for name in [*FILES, "MD5SUMS"])


def write_digits(root: Path, train: int = 60_000, test: int = 10_000, seed: int = 1) -> Path:
    """Make the digits set under root, and return root; a complete one is kept.

    One process calls it, before any rank starts. train, test: the number of images.
    Raises OSError if it cannot be written.
    """
    if _is_complete(root):
        return root
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".digits-", dir=root) as scratch:
        raw = Path(scratch) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        digests = ""
        for name, content in zip(FILES, _make_both(train, test, seed), strict=True):
            (raw / name).write_bytes(content)
            # MD5 because torchvision and MNIST's published digests use it; it guards against
            # accidents only.
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            digests += f"{digest}  {name}\n"
        (raw / "MD5SUMS").write_text(digests)
        try:
            raw.parent.rename(root / "MNIST")
        except OSError:
            # There is a folder already: fine if another process has just finished the same set.
            if not _is_complete(root):
                raise
    return root
