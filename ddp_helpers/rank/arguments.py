"""Read the flags of the MNIST scripts: those of PyTorch's own example, and where the data and the record are."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ddp_helpers.rank.launchers import stop

GROUP_FLAGS = {
    "global_batch_size": {"type": int, "help": "samples in a step of all ranks, instead of --batch-size for each"},
    "timeout": {"type": int, "default": 600, "help": "seconds that a rank waits for another"},
}
RESUME_FLAGS = GROUP_FLAGS | {
    "checkpoint_every": {"type": int, "help": "steps from one checkpoint to the next; else one after each epoch"},
    "vote_every": {"type": int, "help": "steps from one vote on stopping to the next; else about a second"},
    "resume": {"default": "auto", "help": "auto: go on in the run folder; never; or the path of a checkpoint"},
}
FLAGS = {"mnist_single": {}, "mnist_fast": {}, "mnist_ddp": GROUP_FLAGS, "mnist_ddp_resumable": RESUME_FLAGS}


def read_flags(**more: dict) -> Namespace:
    """Read the flags, and more of them; stops at one that cannot be used."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.error = lambda message: stop(f"{parser.prog}: {message}; --help lists the flags")
    parser.add_argument("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="the data's folder")
    parser.add_argument("--run-dir", type=Path, help="new folder for the record of the run")
    parser.add_argument("--precision", choices=("bf16", "float32"), help="else bf16 where the device has units for it")
    more["num_workers"] = {"type": int, "help": "DataLoader processes; else one less than there are CPUs"}
    numbers = {"batch_size": 64, "test_batch_size": 1000, "epochs": 14, "lr": 1.0, "gamma": 0.7}
    numbers |= {"seed": 1, "log_interval": 100}
    more = {name: {"type": type(default), "default": default} for name, default in numbers.items()} | more
    more |= {name: {"action": "store_true"} for name in ("dry_run", "save_model", "no_cuda")}
    for name, options in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    args = parser.parse_args()
    for name, value in vars(args).items():
        least = 0 if name in ("num_workers", "seed") else 1e-9
        if type(value) in (int, float) and not least <= value < 2**31:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range")
    return args
