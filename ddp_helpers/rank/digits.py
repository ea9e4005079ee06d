"""An offline stand-in for MNIST: hand-drawn-looking digits in MNIST's own file format."""

import hashlib
import struct
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

__all__ = ["write_digits"]  # the rest are its parts

SIDE = 28  # pixels along each side of an image, as in MNIST
DOTS = 64  # ink dots along the strokes of one digit: about a pixel apart or less
CHUNK = 500  # images drawn at once: few enough to stay in the processor's cache
FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

# Two or three ways to draw each digit. "10 70 39" is one stroke from x=1 y=0 through x=7 y=0 to x=3 y=9,
# with y pointing down; a comma lifts the pen, and a point given twice makes a sharper corner.
STYLES = {
    0: ["50 30 11 17 39 59 77 71 50", "61 50 30 12 17 39 59 77 72 50 30"],
    1: ["50 49", "32 50 50 59", "32 50 50 59,29 89"],
    2: ["12 11 30 60 72 64 19 19 89", "12 30 60 72 55 28 17 26 48 88", "12 30 60 83 64 28 29 89"],
    3: ["11 30 60 72 63 44 44 65 77 59 29 17", "10 70 70 44 44 75 77 59 29 17"],
    4: ["30 15 15 85,60 69", "60 16 16 86,60 59", "20 13 35 75,71 74 69"],
    5: ["80 20 20 14 44 75 77 59 29 18", "20 24 54 75 77 59 29 18,20 80"],
    6: ["60 31 13 17 39 59 77 75 54 34 16", "50 23 16 28 59 78 65 45 17"],
    7: ["10 70 70 39", "10 80 80 49,24 74", "12 10 10 80 80 55 49"],
    8: ["71 50 20 12 34 64 77 69 39 17 35 54 73 71", "40 12 14 54 73 60 40,44 15 18 49 78 75 44"],
    9: ["72 50 20 12 15 45 74 72 69", "72 50 20 12 15 45 74 72 77 59 29", "71 30 12 15 45 72 71 71 59"],
}


def round_corners(line: torch.Tensor) -> torch.Tensor:
    """Cut a line's corners twice, after Chaikin: a hand does not draw sharp ones."""
    for _ in range(2):
        a, b = line[:-1], line[1:]
        cut = torch.stack([0.75 * a + 0.25 * b, 0.25 * a + 0.75 * b], dim=1).flatten(0, 1)
        line = torch.cat([line[:1], cut, line[-1:]])
    return line


def trace(style: str) -> torch.Tensor:
    """Return DOTS points (x, y) evenly spaced along a style's strokes, in -1 to 1."""
    strokes = [torch.tensor([[float(x), float(y)] for x, y in s.split()]) for s in style.split(",")]
    strokes = [round_corners(stroke / 4.5 - 1) for stroke in strokes]
    starts, ends = torch.cat([s[:-1] for s in strokes]), torch.cat([s[1:] for s in strokes])
    lengths = (ends - starts).norm(dim=1)
    reached = lengths.cumsum(0)
    wanted = torch.linspace(0, reached[-1].item(), DOTS)
    segment = torch.searchsorted(reached, wanted).clamp(max=len(lengths) - 1)
    fraction = (wanted - reached[segment] + lengths[segment]) / lengths[segment]
    return torch.lerp(starts[segment], ends[segment], fraction[:, None])


def pen_paths(styles: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return where each pen goes when hands of all kinds draw these styles: (N, DOTS, 2), in pixels."""

    def vary(*shape: int) -> torch.Tensor:
        return 2 * torch.rand(len(styles), *shape, generator=generator) - 1

    # Most writers are neat, a few are careless: without those few, a small network would make no mistake.
    mess = 0.4 + 1.4 * torch.rand(len(styles), 1, 1, generator=generator) ** 6
    length = styles.diff(dim=1).norm(dim=2).sum(dim=1)[:, None, None]  # a long stroke has room to wobble
    wobble = F.interpolate(vary(2, 7), size=DOTS, mode="linear", align_corners=True)
    wobble = F.avg_pool1d(wobble, 9, stride=1, padding=4, count_include_pad=False).transpose(1, 2)
    path = styles + 0.06 * mess * length * wobble
    path = path + 0.17 * mess * torch.sin(2 * vary(1, 2) * path.flip(2) + 3 * vary(1, 2))  # a smooth bend
    x, y = path.unbind(2)
    angle, slant = 0.25 * vary(1), 0.15 + 0.3 * vary(1)
    x, y = (8.8 + 1.8 * vary(1)) * (x - slant * y), (9 + vary(1)) * y
    path = torch.stack([angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y], dim=2)
    # Centred by mass, as in MNIST; the shift makes up for these writers being more alike than real ones.
    return path - path.mean(dim=1, keepdim=True) + (SIDE - 1) / 2 + 1.8 * vary(1, 2)


def draw(paths: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return an image for each pen path: (N, SIDE, SIDE) uint8, white ink on black."""
    x, y = ((axis[:, :, None] - torch.arange(SIDE)) ** 2 for axis in paths.unbind(2))
    nearest = torch.full((len(paths), SIDE, SIDE), torch.inf)  # squared distance to the nearest dot
    for dot in range(DOTS):
        torch.minimum(nearest, x[:, dot, None, :] + y[:, dot, :, None], out=nearest)
    thickness, strength = torch.rand(2, len(paths), 1, 1, generator=generator)
    depth = 0.8 + 0.9 * thickness - nearest.sqrt()  # pixels inwards from the edge of the ink
    ink = (0.5 + 1.5 * depth).clamp(0, 1) * (0.85 + 0.15 * strength)
    return (255 * ink).to(torch.uint8)


def idx(magic: int, *sizes: int) -> tuple[bytearray, torch.Tensor]:
    """Return an empty IDX file, MNIST's format, and the uint8 tensor that is its body."""
    header = struct.pack(f">{1 + len(sizes)}I", magic, *sizes)
    content = bytearray(header + bytes(torch.Size(sizes).numel()))
    return content, torch.frombuffer(content, dtype=torch.uint8, offset=len(header)).view(sizes)


def make(size: int, generator: torch.Generator) -> tuple[bytearray, bytearray]:
    """Return the image file and the label file of a set of this many digits."""
    # Six slots for each digit, since two styles and three styles both fill six evenly.
    styles = [torch.stack([trace(ways[i % len(ways)]) for i in range(6)]) for ways in STYLES.values()]
    styles = torch.stack(styles)
    image_file, images = idx(2051, size, SIDE, SIDE)
    label_file, labels = idx(2049, size)
    labels.copy_(torch.randint(10, (size,), generator=generator))
    for some_images, some_labels in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
        style = torch.randint(6, (len(some_labels),), generator=generator)
        paths = pen_paths(styles[some_labels.long(), style], generator)
        some_images.copy_(draw(paths, generator))
    return image_file, label_file


def make_both(train: int, test: int, seed: int) -> list[bytearray]:
    """Return the contents of FILES: the training set, then the test set."""
    generator = torch.Generator().manual_seed(seed)  # its own: a learner's seed stays as it was
    threads = torch.get_num_threads()
    # The work is many short steps: on a busy machine, several threads would mostly wait for one another.
    torch.set_num_threads(1)
    try:
        return [*make(train, generator), *make(test, generator)]
    finally:
        torch.set_num_threads(threads)


def is_complete(root: Path) -> bool:
    """Say whether root holds a digits set: it appears all at once, so its files' presence is enough."""
    return all((root / "MNIST" / "raw" / name).is_file() for name in [*FILES, "MD5SUMS"])


def write_digits(root: Path, train: int = 60_000, test: int = 10_000, seed: int = 1) -> Path:
    """Make the digits set under root, once (a complete one is kept); one process, before any rank starts."""
    if is_complete(root):
        return root
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".digits-", dir=root) as scratch:
        raw = Path(scratch) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        contents = make_both(train, test, seed)
        # MD5 because torchvision and MNIST's published digests use it; it guards against accidents only.
        digests = [hashlib.md5(content, usedforsecurity=False).hexdigest() for content in contents]
        for name, content in zip(FILES, contents, strict=True):
            (raw / name).write_bytes(content)
        (raw / "MD5SUMS").write_text("".join(f"{d}  {n}\n" for d, n in zip(digests, FILES, strict=True)))
        try:
            raw.parent.rename(root / "MNIST")
        except OSError:  # there is a folder already: fine if another process has just finished the same set
            if not is_complete(root):
                raise
    return root
