"""The helpers of the course: one subpackage for each task, from `rank` to `upkeep`.

Every subpackage imports this module; it needs only the standard library.
"""

import os
from pathlib import Path

from ddp_tools import PlainError

__version__ = "0.1.0"
ROOT = Path(__file__).resolve().parents[1]
# The run folders: next to the course, or in a chosen folder, such as $SCRATCH/runs.
RUNS: Path  # made by __getattr__


def __getattr__(name: str) -> Path:
    """Return RUNS from the current environment: a forked process has a different one."""
    if name != "RUNS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Path(os.environ.get("DDP_RUNS") or ROOT / "runs").absolute()


def own_folder(folder: Path) -> Path:
    """Make a folder of the checkout, and return it. Raises PlainError if it is not writable."""
    cure = "make a copy of the course of your own: docs/instructors.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlainError(f"{folder} cannot be made ({error.strerror}): {cure}") from None
    if not os.access(folder, os.W_OK):
        raise PlainError(f"{folder} is not yours to write to: {cure}")
    return folder
