"""Save the state of training whole or not at all, and load only what is whole."""

import hashlib
import os
import re
from io import BytesIO
from pathlib import Path

import torch

KEPT = 2  # the newest, and one more in case the newest is damaged
NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt", re.ASCII)  # the digest is of the content, as torch.hub has it


class CheckpointError(ValueError):
    """A file that is not a whole checkpoint; one line that names it."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. Any process may call it."""
    found = folder.iterdir() if folder.is_dir() else ()  # a folder that cannot be read is an OSError, not an empty one
    return sorted((path for path in found if NAME.fullmatch(path.name)), reverse=True)


def save(folder: Path, step: int, state: dict) -> Path:
    """Write step-STEP-DIGEST.pt, keep the last two, and give its path; one rank calls it.

    Whenever it is killed, the folder holds only whole checkpoints: a file has its name after all of it is on the disk.
    Raises OSError with the older ones left as they were.
    """
    buffer = BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path = folder / f"step-{step:08}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    part = folder / "saving.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before its name is
        part.replace(path)
        sync(folder)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    for old in checkpoints(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk, so that a power cut does not take the new one back."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def content_of(path: Path) -> bytes:
    """The bytes of a checkpoint; one rank calls it. Raises CheckpointError if not whole, OSError if unreadable."""
    name = NAME.fullmatch(path.name)
    if not name:
        raise CheckpointError(f"{path} is not named step-STEP-DIGEST.pt, so nothing says whether it is whole")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != name[2]:
        raise CheckpointError(f"{path} is cut short or damaged: its content has another SHA-256 than its name says")
    return content


def unpack(content: bytes) -> dict:
    """The state in a checkpoint's bytes, on the CPU; every rank calls it. Raises CheckpointError."""
    try:
        state = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: whatever it is, this is no checkpoint
        raise CheckpointError(
            f"it cannot be loaded safely ({type(error).__name__}): no checkpoint of this course"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"it holds a {type(state).__name__}: no checkpoint of this course")
    return state


def newest(folder: Path) -> tuple[bytes, list[str]]:
    """The newest whole checkpoint (b"" if there is none), and a line on each that was refused; one rank calls it.

    What is damaged is renamed to .damaged, so that it does not count as one of the two that are kept. What cannot be
    read now may be whole: that is an OSError, and stays.
    """
    refused = []
    for path in checkpoints(folder):
        try:
            return content_of(path), refused
        except CheckpointError as error:
            refused.append(f"{error}; set aside as {path.stem}.damaged")
            path.replace(path.with_suffix(".damaged"))
    return b"", refused
