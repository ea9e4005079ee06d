"""Run commands of a notebook on simulated GPUs, to get CUDA's and NCCL's messages.

The notebooks' kernel calls it.
"""

import sys

from ddp_tools import PlainError
from ddp_tools.simulated_gpus.build import build


def simulates_gpus() -> bool:
    """Return whether this machine can simulate GPUs; if not, print why.

    Compiles them if they are not there yet, which takes half a minute.
    """
    try:
        build()
    except PlainError as error:
        print(f"no simulated GPUs, so runs that need them are left out: {error}")
        return False
    return True


def on_simulated_gpus(count: int) -> list[str]:
    """Return the words that give a command `count` simulated GPUs, even next to real ones."""
    return [sys.executable, "-m", "ddp_helpers", "gpus", str(count), "--beside-real-gpus", "--"]
