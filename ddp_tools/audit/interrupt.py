"""Interrupt this rank where the audit asks for it: a kill, a signal, or half a checkpoint.

Each rank has one `Interruption`. DDP_AUDIT_INTERRUPT says what is to happen, and on which rank:
"kill RANK", two steps after its first torch.save; "signal RANK STEP", before that step of its
optimizer; "tear RANK NUMBER", in its torch.save of that number, with half of the bytes written.
"""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_tools.audit.notes import Stopped, Told
from ddp_tools.audit.writer import NoteWriter

# What Slurm sends for a preemption, and what --signal usually names; the first with a handler.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# From a process of its own: a loader's worker takes a signal of its parent for an ordinary end.
_SEND = "import os, sys; os.killpg(int(sys.argv[1]), int(sys.argv[2]))"


class Interruption:
    """What is to happen to this rank, if anything, and whether its time has come."""

    def __init__(self, writer: NoteWriter) -> None:
        """Read what is asked of this rank."""
        self._writer = writer
        kind, rank, *number = os.environ.get("DDP_AUDIT_INTERRUPT", "").split() or ("", "")
        self._kind = kind if rank == writer.rank else ""
        self._number = int(number[0]) if number else 0
        self._first_save = 0  # after which step
        self._saves = 0
        self._half = b""  # of what was saved into memory: the next file that is opened gets it

    def before_step(self) -> None:
        """An optimizer is about to step, and is counted."""
        steps = self._writer.steps
        if self._kind == "kill" and 0 < self._first_save < steps - 2:
            self._kill_all("")
        if self._kind == "signal" and steps == self._number:
            self._send_signal()

    def before_save(self, save: Callable[..., object], obj: object, file: Any) -> None:
        """torch.save is called; save: torch's own, which nothing observes."""
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
        """A file is about to be opened to write."""
        if self._half:
            half, self._half = self._half, b""
            self._tear(path, half)

    def _tear(self, path: Path, half: bytes) -> None:
        path.write_bytes(half)
        self._kill_all(path.name)

    def _kill_all(self, file: str) -> None:
        """Kill all ranks; file: the name of the one that is half written, or ""."""
        self._writer.note(Stopped, file=file)
        pids = [int(path.read_text()) for path in self._writer.folder.glob("rank*.pid")]
        for pid in sorted(pids, key=os.getpid().__eq__):  # this one last
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _send_signal(self) -> None:
        """Send this rank, and what it has started, a signal that it handles; else SIGTERM."""
        handled = [number for number in _SIGNALS if callable(signal.getsignal(number))]
        number = [*handled, _SIGNALS[0]][0]
        steps = self._writer.steps
        self._writer.note(Told, signal=number.name, handled=bool(handled), steps=steps)
        words = [sys.executable, "-S", "-E", "-c", _SEND, str(os.getpgrp()), str(int(number))]
        subprocess.run(words, start_new_session=True, check=True)
