"""Read the flags of the MNIST scripts: those of PyTorch's own example, and where the data and the record are."""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from math import prod
from pathlib import Path

from ddp_helpers.rank.launchers import cpus_of_rank, stop


def damage(folder: Path) -> str:
    """Say what is wrong with the MNIST files in a folder, by their first bytes and lengths, or "" if nothing is."""
    for part in ("train", "t10k"):
        counts = []
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            path = folder / "MNIST" / "raw" / name
            try:
                with path.open("rb") as file:
                    head = file.read(16)  # its fourth byte counts the sizes that follow, four bytes each
                sizes = [int.from_bytes(head[4 * i : 4 * i + 4], "big") for i in range(1, 1 + head[3])]
                if path.stat().st_size != 4 + 4 * len(sizes) + prod(sizes):
                    return f"{name}: cut short"
                counts.append(sizes[0])
            except IndexError:
                return f"{name}: empty"
            except OSError as error:
                return f"{name}: {error.strerror}"
        if counts[0] != counts[1]:
            return f"{part}: {counts[0]} images, but {counts[1]} labels"
    return ""


def holds_run(folder: Path) -> bool:
    """Whether a run has written into the folder: its settings from its start on, its measurements from an epoch on."""
    return any(os.path.exists(folder / name) for name in ("spec.json", "metrics.jsonl"))  # noqa: PTH110 raises nothing


def read_flags(**more: object) -> Namespace:
    """Read the flags; stops at one that cannot be used. more: flags that only this script has, with their defaults."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: stop(f"{parser.prog}: {message}; --help lists the flags")
    parser.add_argument("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="the data's folder")
    parser.add_argument("--run-dir", type=Path, help="new folder for the record of the run")
    parser.add_argument("--precision", choices=("bf16", "float32"), help="else bf16 where the device has units for it")
    more |= {"batch_size": 64, "test_batch_size": 1000, "epochs": 14, "lr": 1.0, "gamma": 0.7, "seed": 1}
    more |= {"log_interval": 100, "num_workers": cpus_of_rank() - 1}  # as many loader processes
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default or 0), default=default)
    for name in ("--no-cuda", "--dry-run", "--save-model"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    for name, value in vars(args).items():
        least = 0 if name in ("num_workers", "seed") else 1e-9
        if type(value) in (int, float) and not least <= value < 2**31:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range")
    if args.num_workers > (most := max(64, 16 * cpus_of_rank())):  # each is a process
        parser.error(f"--num-workers {args.num_workers} is out of range: at most {most}, 16 for each CPU, or 64")
    if args.run_dir and "resume" not in more and holds_run(args.run_dir):
        stop(f"--run-dir {args.run_dir} holds a run: choose a new folder")
    return args
