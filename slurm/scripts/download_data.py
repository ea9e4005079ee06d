"""Put MNIST into a folder, once, before any run starts: compute nodes have no network.

python download_data.py --data data
"""

from __future__ import annotations

from argparse import ArgumentParser
from http.client import HTTPException
from pathlib import Path
from torchvision.datasets import MNIST
from typing import NoReturn
import hashlib
import os
import socket
import sys
import tempfile


def main() -> None:
    """Download what is missing, and check what is there."""
    parser = ArgumentParser(usage="%(prog)s [--data FOLDER]", description=__doc__)
    folder_help = "folder that will hold MNIST/raw"
    parser.add_argument("--data", type=Path, default=Path("data"), help=folder_help)
    folder = parser.parse_args().data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_files(folder):
            download(folder)
    except ConnectionError as error:
        cure = "copy MNIST/raw there from a machine that has a network"
        stop(f"--data {folder}: no download ({error}): {cure}")
    except OSError as error:
        stop(f"--data {folder} cannot be written ({error.strerror}): choose another folder")
    print(f"{check_data(folder)} is whole; use it with: --data {folder}")


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in MNIST_MD5)


def download(root: Path, seconds: float = 10) -> None:
    """Have torchvision download MNIST into root.

    Raises ConnectionError where it cannot, or where a mirror says nothing for so many seconds.
    """
    usual = socket.getdefaulttimeout()
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        socket.setdefaulttimeout(seconds)  # a network that drops packets would hold it for ever
        try:
            MNIST(folder, download=True)
        except (OSError, RuntimeError, HTTPException) as error:
            raise ConnectionError(str(error)) from error
        finally:
            socket.setdefaulttimeout(usual)
        check_data(Path(folder))
        if not has_files(root):
            (Path(folder) / "MNIST").rename(root / "MNIST")


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


# MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
MNIST_MD5 = {
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


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}


if __name__ == "__main__":
    main()
