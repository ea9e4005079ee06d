"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

python download_data.py --data data
"""

from __future__ import annotations

from argparse import ArgumentParser
from multiprocessing import get_context
from pathlib import Path
from torch import Generator, Tensor
from torchvision.datasets import MNIST
from typing import NoReturn
from urllib.parse import urlparse
import hashlib
import os
import socket
import struct
import sys
import tempfile
import torch
import torch.nn.functional as F



def main() -> None:
    """Download what is missing, and check what is there."""
    parser = ArgumentParser(usage="%(prog)s [--data FOLDER]", description=__doc__)
    folder_help = "folder that will hold MNIST/raw"
    parser.add_argument("--data", type=Path, default=Path("data"), help=folder_help)
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_files(folder) and not download(folder, seconds=600):
            stop(
                f"--data {folder}: no network, so no download: "
                "copy MNIST/raw there from a machine that has one"
            )
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")



# What launchers export. The last three words are rank, local rank and world size; before them
# stands what names this start. The first row whose words are all set counts, as a whole: inside a
# Slurm job mpirun's ranks have SLURM_PROCID=0, too.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}

# Two classes stand behind the backend "nccl". Read in torch 2.15, where the newer became the
# default: its getFuture, which DDP calls for each bucket, makes the computing stream wait, so
# that nothing overlaps. This takes the older one, in 2.14 as in 2.15; before, no torch reads it.
OLDER_NCCL = "TORCH_DIST_USE_NCCL2", "0"


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def who_am_i() -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size from the environment; every rank calls it."""
    for launcher, names in LAUNCHERS.items():
        if all(name in os.environ for name in names):
            rank, local_rank, world_size = (int(os.environ[name]) for name in names[-3:])
            return launcher, rank, local_rank, world_size
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name, "1") != "1":
            cure = "start it with srun, mpirun or torchrun"
            sys.exit(f"{name}={os.environ[name]}, but no launcher started this process: {cure}")
    return "single", 0, 0, 1


def cpus_of_rank() -> int:
    """Count the CPUs that this process has to itself; any process calls it.

    They are those of its Slurm task, or its share of torchrun's.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cpus = len(os.sched_getaffinity(0))
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's ranks on this node
    task_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task_cpus.isdecimal() and int(task_cpus):
        cpus = min(cpus, int(task_cpus))  # of the task, which is torchrun with all its ranks
    return max(1, cpus // max(1, int(sharing) if sharing.isdecimal() else 1))


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
    """Draw each style by another hand: [n, _DOTS, 2] in -1 to 1 become [n, _DOTS, 2] in pixels."""

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
    # Centred by mass, as in MNIST; the shift makes up for these writers being more alike than
    # real ones.
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
    """Make the image file and the label file of a set of so many digits."""
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
    generator = torch.Generator().manual_seed(seed)  # torch's own stays as the learner set it
    threads = torch.get_num_threads()
    # The work is many short steps: on a busy machine, several threads would mostly wait for one
    # another.
    torch.set_num_threads(1)
    try:
        return [*_make_set(train, generator), *_make_set(test, generator)]
    finally:
        torch.set_num_threads(threads)


def _is_complete(root: Path) -> bool:
    """Tell whether root holds a digits set; it appears all at once, so that its files' names do."""
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


# MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
_MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it.

    Stops unless all four files are whole, by their MD5.
    """
    raw = Path(root) / "MNIST" / "raw"
    try:
        digests = _read_digests(raw / "MD5SUMS") or _MNIST_MD5
        for name in _MNIST_MD5:
            path = raw / name
            if not path.is_file():
                stop(
                    f"--data {root}: {path} is missing; get it once, before any rank: "
                    f"python -m ddp_helpers data {root}, "
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
    return "MNIST" if digests == _MNIST_MD5 else "digits"


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in _MNIST_MD5)


def _reachable(seconds: float) -> bool:
    """Tell whether one of torchvision's mirrors answers within so many seconds."""
    for mirror in MNIST.mirrors:
        try:
            host = urlparse(mirror).hostname
            socket.create_connection((host, 443), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


def download(root: Path, seconds: float) -> bool:
    """Have torchvision download MNIST into root; returns whether it did.

    A process of its own does it, which is ended after so many seconds.
    """
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        spawn = get_context("spawn").Process
        process = spawn(target=MNIST, args=(folder,), kwargs={"download": True}, daemon=True)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
        if process.exitcode != 0:
            return False
        check_data(Path(folder))
        if not has_files(root):
            (Path(folder) / "MNIST").rename(root / "MNIST")
    return True


def stage(folder: Path = Path("data"), seconds: float = 120) -> Path:
    """Return the folder to give as --data, filled if need be; one process calls it, first.

    DDP_MNIST_ROOT, where it is set, names a folder with real MNIST. Otherwise it is `folder`: with
    MNIST, downloaded if the network allows it within `seconds`, or else with the generated digits,
    in the same files. Stops where there are files that are not whole.
    """
    if root := os.environ.get("DDP_MNIST_ROOT"):
        print(f"{check_data(Path(root))} is staged (DDP_MNIST_ROOT)")
        return Path(root)
    folder = Path(folder)
    if has_files(folder):
        print(f"{check_data(folder)} is staged")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if _reachable(5) and download(folder, seconds):
        print("MNIST is downloaded")
        return folder
    size = "60,000 + 10,000 images in its file format"
    print(f"No network: digits are made here instead of MNIST, {size}")
    return write_digits(folder)


if __name__ == "__main__":
    main()
