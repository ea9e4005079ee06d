"""Run commands of a notebook on simulated GPUs, so that CUDA's and NCCL's messages can be had.

The notebooks' kernel calls it.
"""

import sys

from ddp_tools import PlainError
from ddp_tools.simulated_gpus.build import build


def simulates_gpus() -> bool:
    """Tell whether this machine can simulate GPUs, and print why if not.

    They are compiled if they are not there yet, which takes half a minute.
    """
    try:
        build()
    except PlainError as error:
        print(f"no simulated GPUs, so what needs them is left out: {error}")
        return False
    return True


def on_simulated_gpus(count: int) -> list[str]:
    """Return the words before a command by which it sees so many, even beside real ones."""
    return [sys.executable, "-m", "ddp_helpers", "gpus", str(count), "--beside-real-gpus", "--"]
