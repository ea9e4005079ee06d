"""The helpers of the course: a room for each job, from `rank` to `upkeep`.

Every room imports what stands here; it needs the standard library alone.
"""

import os
from pathlib import Path

from ddp_tools import PlainError

__version__ = "0.1.0"
ROOT = Path(__file__).resolve().parents[1]
# The run folders: beside the course, or where somebody wants them, such as $SCRATCH/runs.
RUNS: Path  # made by __getattr__


def __getattr__(name: str) -> Path:
    """Return RUNS by the environment of who imports it: a forked process has one of its own."""
    if name != "RUNS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Path(os.environ.get("DDP_RUNS") or ROOT / "runs").absolute()


def own_folder(folder: Path) -> Path:
    """Make a folder of the checkout, and return it. Raises PlainError where one may not write."""
    cure = "make a copy of the course of your own: docs/instructors.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlainError(f"{folder} cannot be made ({error.strerror}): {cure}") from None
    if not os.access(folder, os.W_OK):
        raise PlainError(f"{folder} is not yours to write to: {cure}")
    return folder
