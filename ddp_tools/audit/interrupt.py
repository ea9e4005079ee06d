"""Interrupt this rank at the point that the audit sets: a kill, a signal, or half a checkpoint.

Each rank has one `Interruption`. DDP_AUDIT_INTERRUPT has the kind of interruption and the rank:
"kill RANK", two steps after its first torch.save; "signal RANK STEP", before that step of its
optimizer; "tear RANK NUMBER", in its torch.save of that number, with half of the bytes written.
"""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_tools.audit.notes import Stopped, Told
from ddp_tools.audit.writer import NoteWriter

# Slurm's signal for a preemption, and the usual ones of --signal; the first with a handler is sent.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# From a separate process: a loader's worker takes a signal from its parent for a normal exit.
_SEND = "import os, sys; os.killpg(int(sys.argv[1]), int(sys.argv[2]))"


class Interruption:
    """The interruption of this rank, if any, and the counts that decide when it happens."""

    def __init__(self, writer: NoteWriter) -> None:
        """Read the interruption of this rank from the environment."""
        self._writer = writer
        kind, rank, *number = os.environ.get("DDP_AUDIT_INTERRUPT", "").split() or ("", "")
        self._kind = kind if rank == writer.rank else ""
        self._number = int(number[0]) if number else 0
        self._first_save = 0  # after which step
        self._saves = 0
        self._half = b""  # of a save into memory: the next file that is opened gets it

    def before_step(self) -> None:
        """Called before an optimizer's step, which the writer has counted already."""
        steps = self._writer.steps
        if self._kind == "kill" and 0 < self._first_save < steps - 2:
            self._kill_all("")
        if self._kind == "signal" and steps == self._number:
            self._send_signal()

    def before_save(self, save: Callable[..., object], obj: object, file: Any) -> None:
        """Called before torch.save; save: torch's own, which notes nothing."""
        self._first_save = self._first_save or self._writer.steps
        self._saves += 1
        if self._kind != "tear" or self._saves != self._number:
            return
        save(obj, content := io.BytesIO())
        half = content.getvalue()[: content.tell() // 2]
        if isinstance(file, str | os.PathLike):
            self._tear(Path(file), half)
        elif isinstance(file, io.BytesIO):
            self._half = half
        elif hasattr(file, "write"):
            file.write(half)
            file.flush()
            self._kill_all(str(getattr(file, "name", "a file")))

    def before_open(self, path: Path) -> None:
        """Called before a file is opened for writing."""
        if self._half:
            half, self._half = self._half, b""
            self._tear(path, half)

    def _tear(self, path: Path, half: bytes) -> None:
        path.write_bytes(half)
        self._kill_all(path.name)

    def _kill_all(self, file: str) -> None:
        """Kill all ranks; file: the name of a half-written file, or ""."""
        self._writer.note(Stopped, file=file)
        pids = [int(path.read_text()) for path in self._writer.folder.glob("rank*.pid")]
        for pid in sorted(pids, key=os.getpid().__eq__):  # this one last
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _send_signal(self) -> None:
        """Send this rank and its child processes a signal that it handles, or else SIGTERM."""
        handled = [number for number in _SIGNALS if callable(signal.getsignal(number))]
        number = [*handled, _SIGNALS[0]][0]
        steps = self._writer.steps
        self._writer.note(Told, signal=number.name, handled=bool(handled), steps=steps)
        workers = [worker.pid for worker in multiprocessing.active_children() if worker.pid]
        waited_for = [pid for pid in workers if not _is_ignored(number, pid)]
        words = [sys.executable, "-S", "-E", "-c", _SEND, str(os.getpgrp()), str(int(number))]
        subprocess.run(words, start_new_session=True, check=True)
        _wait_for_deaths(waited_for)


def _is_ignored(number: signal.Signals, pid: int) -> bool:
    """Whether the process ignores this signal; False if the system cannot say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _wait_for_deaths(pids: list[int]) -> None:
    """Wait until these child processes have died of the signal, or 5 seconds: then they live.

    Without it the rank might leave before it learns of a worker's death. It leaves their statuses
    for the loader, which raises on SIGCHLD, here.
    """
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return time.sleep(1 if pids else 0)
    end = time.monotonic() + 5
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    for pid in pids:
        with suppress(ChildProcessError):
            while not os.waitid(os.P_PID, pid, options) and time.monotonic() < end:
                time.sleep(0.01)
