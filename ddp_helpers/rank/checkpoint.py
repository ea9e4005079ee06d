"""Checkpoint files: written whole or not at all, named after their content, the last two kept."""

import hashlib
from io import BytesIO
from pathlib import Path

import torch

from ddp_helpers.rank.record import write


def save(folder: Path, step: int, state: dict) -> Path:
    """Write step-STEP-DIGEST.pt, named after the SHA-256 of its content, and keep the last two; one rank calls it."""
    torch.save(state, content := BytesIO())
    name = f"step-{step:08}-{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.pt"
    write(folder, {name: content.getvalue()})
    for old in checkpoints(folder)[2:]:
        old.unlink()
    return folder / name


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*-*.pt"), reverse=True)


def read(path: Path) -> bytes:
    """Read a checkpoint. Raises ValueError if its content is not what its name says, OSError if it cannot be read."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != path.stem.rpartition("-")[2]:
        raise ValueError(f"{path} is cut short or damaged: its content has another SHA-256 than its name says")
    return content


def newest(folder: Path) -> bytes:
    """Read the newest checkpoint that is whole; b"" if there is none. One that is not is set aside, and named."""
    for path in checkpoints(folder):
        try:
            return read(path)
        except ValueError as error:
            print(f"{error}; set aside as {path.stem}.damaged", flush=True)
            path.replace(path.with_suffix(".damaged"))
    return b""


def unpack(content: bytes) -> dict:
    """Load a checkpoint's content onto the CPU. Raises an error of pickle's if it holds more than data."""
    return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
