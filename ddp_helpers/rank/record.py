"""Write the record of a run: a folder that says what was asked, where it ran, what came out, and how it ended."""

import json
import os
from pathlib import Path
from types import TracebackType

from ddp_helpers.rank.launchers import stop


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: it gets its name when all of it is there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name("part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # on the disk first: after a power cut the name has all of it behind it
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class Record:
    """The record of a run, in a new folder: spec.json, env.json, metrics.jsonl, status.json. No folder, no record."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.lines = folder, b""
        if folder and (folder / "metrics.jsonl").exists():
            stop(f"--run-dir {folder} holds a run: choose a new folder")

    def note(self, **files: dict) -> None:
        """Write name.json for each name."""
        for name, content in files.items() if self.folder else ():
            write(self.folder / f"{name}.json", json.dumps(content, indent=1, default=str).encode())

    def epoch(self, epoch: int, **metrics: float) -> None:
        """Add an epoch's line to metrics.jsonl, and print its score."""
        right, n = metrics["test_accuracy"] * metrics["test_samples"], metrics["test_samples"]
        print(f"epoch {epoch}: {right:.0f}/{n:.0f} right, {metrics['images_per_second']:,.0f} images/s", flush=True)
        self.lines += json.dumps({"epoch": epoch} | metrics).encode() + b"\n"
        if self.folder:
            write(self.folder / "metrics.jsonl", self.lines)

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failed = {"state": getattr(error, "state", "failed"), "why": f"{type(error).__name__}: {error}"}
        try:
            self.note(status=failed if error else {"state": "done"})
        except OSError as full:
            error = error or full
        if isinstance(error, OSError):
            stop(f"--run-dir {self.folder or Path()}: {error}: choose a folder with room that you may write to")
