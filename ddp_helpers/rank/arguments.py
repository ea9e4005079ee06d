"""Read the flags of the MNIST scripts: those of PyTorch's own example, and some for a cluster.

Each script calls `read_flags` on every rank, before the ranks meet; so does the learner's process
that makes a job of a script. It needs the standard library.
"""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, NoReturn

from ddp_helpers.rank.launchers import cpus_of_rank, stop


def describe_damage(folder: Path) -> str:
    """Describe what is wrong with the MNIST files in a folder; "" if nothing is.

    It looks at their first bytes and their lengths; any process calls it.
    """
    for part in ("train", "t10k"):
        counts = []
        for kind in ("images-idx3", "labels-idx1"):
            name = f"{part}-{kind}-ubyte"
            try:
                counts.append(_count_items(folder / "MNIST" / "raw" / name))
            except ValueError as error:
                return f"{name}: {error}"
            except OSError as error:
                return f"{name}: {error.strerror}"
        images, labels = counts
        if images != labels:
            return f"{part}: {images} images, but {labels} labels"
    return ""


def _count_items(path: Path) -> int:
    """Count the images or labels in an IDX file. Raises ValueError if it is empty or cut short."""
    with path.open("rb") as file:
        header = file.read(16)
    if len(header) < 4:
        raise ValueError("empty")
    dimensions = header[3]  # the size of each follows, in four bytes
    starts = range(4, 4 + 4 * dimensions, 4)
    sizes = [int.from_bytes(header[start : start + 4], "big") for start in starts]
    if path.stat().st_size != 4 + 4 * dimensions + prod(sizes):
        raise ValueError("cut short")
    if not sizes:
        raise ValueError("empty")
    return sizes[0]


def holds_run(folder: Path) -> bool:
    """Tell whether a run has written into the folder: its settings, or an epoch's measurements."""
    names = ("spec.json", "metrics.jsonl")
    return any(os.path.exists(folder / name) for name in names)  # noqa: PTH110 raises nothing


class Flag(NamedTuple):
    """A flag's default, and what it is for; one without a default takes a whole number."""

    default: float | str | None
    purpose: str


# Flags that only these scripts have.
DDP_FLAGS = {
    "batch_size_per_rank": Flag(
        None,
        "in place of --batch-size: the samples in a step of each rank",
    ),
    "timeout": Flag(600, "seconds that ranks wait for each other"),
}
RESUME_FLAGS = DDP_FLAGS | {
    "checkpoint_every": Flag(
        None,
        "steps from one checkpoint to the next; there is one after each epoch",
    ),
    "vote_every": Flag(None, "steps from one vote on stopping to the next, else about a second"),
    "resume": Flag("auto", "auto, to go on in the run folder; never; or the path of a checkpoint"),
}
_USUAL_FLAGS = {
    "batch_size": Flag(64, "samples in a step, of all ranks together"),
    "test_batch_size": Flag(1000, "samples that a rank tests at a time"),
    "epochs": Flag(14, "passes over the training set"),
    "lr": Flag(1.0, "learning rate"),
    "gamma": Flag(0.7, "factor of the learning rate after each epoch"),
    "seed": Flag(1, "of the first weights, the order of the samples and the dropout"),
    "log_interval": Flag(100, "steps from one line of progress to the next"),
    # Each holds about eight files open, and many systems allow a process 1,024.
    "num_workers": Flag(min(cpus_of_rank() - 1, 8), "processes of each rank that load data"),
}


class OneLineParser(ArgumentParser):
    """An ArgumentParser that reports a mistake in one line, which `label` begins."""

    label = ""

    def error(self, message: str) -> NoReturn:
        """Stop the process with the message."""
        stop(f"{self.label}{message}; --help lists the flags")


def read_flags(more: Mapping[str, Flag], argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags from argv, or the command line; stops at one that cannot be used.

    more: the flags that only this script has.
    """
    layout = RawDescriptionHelpFormatter
    parser = OneLineParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    data = os.environ.get("DDP_MNIST_ROOT", "data")
    precision_help = "else bf16 where the device has units for it"
    add("--data", type=Path, default=data, help="the data's folder")
    add("--run-dir", type=Path, help="new folder for the record of the run")
    add("--precision", choices=("bf16", "float32"), help=precision_help)
    for name, (default, purpose) in {**_USUAL_FLAGS, **more}.items():
        kind = int if default is None else type(default)
        purpose = purpose if default is None else f"{purpose} ({default})"
        add(f"--{name.replace('_', '-')}", type=kind, default=default, help=purpose)
    for flag in ("--no-cuda", "--dry-run", "--save-model"):
        add(flag, action="store_true")
    args = parser.parse_args(argv)
    _check_ranges(parser, args)
    if args.run_dir and "resume" not in args and holds_run(args.run_dir):
        stop(f"--run-dir {args.run_dir} holds a run: choose a new folder")
    return args


def _check_ranges(parser: OneLineParser, args: Namespace) -> None:
    """Stop at a number that no run can use."""
    for name, value in vars(args).items():
        least = 0 if name in ("num_workers", "seed") else 1e-9
        if type(value) in (int, float) and not least <= value < 2**31:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range")
    cpus = cpus_of_rank()
    most = max(64, 16 * cpus)  # each worker is a process
    if args.num_workers > most:
        parser.error(
            f"--num-workers {args.num_workers} is out of range: "
            f"at most {most}, 16 for each CPU, or 64"
        )


def share_batch(args: Namespace, world_size: int) -> None:
    """Set args.batch_size to the samples in a step of all ranks together; every rank calls it.

    Stops where the ranks cannot share them evenly.
    """
    if args.batch_size_per_rank:
        args.batch_size = args.batch_size_per_rank * world_size
    share, remainder = divmod(args.batch_size, world_size)
    if remainder:
        shares = [size for size in (share, share + 1) if size]
        sizes = " or ".join(str(size * world_size) for size in shares)
        problem = f"--batch-size {args.batch_size} cannot be shared evenly by {world_size} ranks"
        stop(f"{problem}: give {sizes}, or --batch-size-per-rank")
