"""Read the flags of the MNIST scripts: those of PyTorch's own example, and where the data and the record are."""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
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


# Flags that only these scripts have, each with its default and what it is for.
DDP_FLAGS = {
    "batch_size_per_rank": (None, "in place of --batch-size: the samples in a step of each rank"),
    "timeout": (600, "seconds that ranks wait for each other"),
}
RESUME_FLAGS = DDP_FLAGS | {
    "checkpoint_every": (None, "steps from one checkpoint to the next; there is one after each epoch"),
    "vote_every": (None, "steps from one vote on stopping to the next, else about a second"),
    "resume": ("auto", "auto, to go on in the run folder; never; or the path of a checkpoint"),
}
USUAL_FLAGS = {
    "batch_size": (64, "samples in a step, of all ranks together"),
    "test_batch_size": (1000, "samples that a rank tests at a time"),
    "epochs": (14, "passes over the training set"),
    "lr": (1.0, "learning rate"),
    "gamma": (0.7, "factor of the learning rate after each epoch"),
    "seed": (1, "of the first weights, the order of the samples and the dropout"),
    "log_interval": (100, "steps from one line of progress to the next"),
    "num_workers": (cpus_of_rank() - 1, "processes of each rank that load data"),
}


def read_flags(more: dict[str, tuple], argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags from argv, or the command line; stops at one that cannot be used. more: the script's own flags."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: stop(f"{message}; --help lists the flags")
    parser.add_argument("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="the data's folder")
    parser.add_argument("--run-dir", type=Path, help="new folder for the record of the run")
    parser.add_argument("--precision", choices=("bf16", "float32"), help="else bf16 where the device has units for it")
    for name, (default, purpose) in (USUAL_FLAGS | more).items():
        purpose = purpose if default is None else f"{purpose} ({default})"
        kind = type(default or 0)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=purpose)
    for name in ("--no-cuda", "--dry-run", "--save-model"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if name in ("num_workers", "seed") else 1e-9
        if type(value) in (int, float) and not least <= value < 2**31:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range")
    if args.num_workers > (most := max(64, 16 * cpus_of_rank())):  # each is a process
        parser.error(f"--num-workers {args.num_workers} is out of range: at most {most}, 16 for each CPU, or 64")
    if args.run_dir and "resume" not in args and holds_run(args.run_dir):
        stop(f"--run-dir {args.run_dir} holds a run: choose a new folder")
    return args


def share_batch(args: Namespace, world_size: int) -> None:
    """Set args.batch_size to the samples in a step of all ranks together, or stop where these cannot share it."""
    if args.batch_size_per_rank:
        args.batch_size = args.batch_size_per_rank * world_size
    share, left = divmod(args.batch_size, world_size)
    if left:
        near = " or ".join(str(size * world_size) for size in (share, share + 1) if size)
        cure = f"give {near}, or --batch-size-per-rank"
        stop(f"--batch-size {args.batch_size} cannot be shared evenly by {world_size} ranks: {cure}")
