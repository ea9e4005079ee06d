"""The command line of the MNIST scripts: the flags of PyTorch's own example, and those a cluster needs."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ddp_helpers.rank.topology import stop


def make_parser() -> ArgumentParser:
    """The flags of every MNIST script; every rank calls it."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.error = lambda message: stop(f"{parser.prog}: {message}; --help lists the flags")  # one line, not a page
    add = parser.add_argument
    add("--batch-size", type=int, default=64, help="training images per rank and step")
    add("--global-batch-size", type=int, help="training images per step of all ranks together, instead")
    add("--test-batch-size", type=int, default=1000)
    add("--epochs", type=int, default=14)
    add("--lr", type=float, default=1.0, help="learning rate of Adadelta")
    add("--gamma", type=float, default=0.7, help="factor on the learning rate after each epoch")
    add("--seed", type=int, default=1)
    add("--log-interval", type=int, default=10, help="steps from one progress line to the next")
    add("--timeout", type=int, default=120, help="seconds to wait for other ranks")
    add("--num-workers", type=int, help="DataLoader workers; without it the data is held on the device if it fits")
    add("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="folder that holds MNIST/raw")
    add("--run-dir", type=Path, help="new folder for the run record")
    add("--precision", choices=("bf16", "float32"), help="of the arithmetic; bf16 where the device has units for it")
    add("--compile", action="store_true", help="compile the optimizer, and on a GPU the model: pays after some epochs")
    add("--dry-run", action="store_true", help="one batch an epoch, to see whether it runs")
    add("--save-model", action="store_true", help="write mnist_cnn.pt at the end, into the run folder if there is one")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    return parser


def parse_arguments(parser: ArgumentParser, world_size: int) -> Namespace:
    """Read the flags; every rank calls it. `batch_size` comes back per rank. Stops at a value that cannot work."""
    args = parser.parse_args()
    for flag, value in vars(args).items():
        lowest = {"num_workers": 0, "seed": 0, "lr": 1e-9, "gamma": 1e-9}.get(flag, 1)
        if type(value) in (int, float) and not lowest <= value < 2**31:
            parser.error(f"--{flag.replace('_', '-')} {value} is out of range: give {lowest} or more")
    if args.global_batch_size:
        args.batch_size, left = divmod(args.global_batch_size, world_size)
        if left or not args.batch_size:
            parser.error(f"--global-batch-size {args.global_batch_size} cannot be shared evenly by {world_size} ranks")
    return args
