"""Write the notes of this rank, each with the script's current line.

The watches of the audit share one writer. Needs torch.
"""

import functools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from signal import SIGKILL
from types import FrameType
from typing import Any

from ddp_tools.audit.digests import is_library
from ddp_tools.audit.notes import Note, TimeUp, to_line

_MOST_CALLERS = 5  # lines of the script that are noted for one call


class NoteWriter:
    """Writes each note at once, so that a kill loses none; holds the counters that notes use."""

    def __init__(self, folder: Path, outermost: FrameType) -> None:
        """Open the file of notes; outermost: the frame that runs the script."""
        self.rank = os.environ.get("RANK", "0")
        self.folder = folder
        self.steps = 0  # of optimizers
        self.forwards = 0  # calls of wrapped models
        self.spent: dict[str, float] = defaultdict(float)  # seconds since the last step, by phase
        self._process = os.getpid()
        self._file = (folder / f"rank{self.rank}.jsonl").open("w", buffering=1)
        self._outermost = outermost
        (folder / f"rank{self.rank}.pid").write_text(str(self._process))

    def note(self, kind: type[Note], **fields: Any) -> None:
        """Write a note with the current time and line."""
        self.write(kind(time=time.time(), at=self.line_of(sys._getframe(1)), **fields))

    def write(self, note: Note) -> None:
        """Write a note; in a loader's worker, which inherits the file, it does nothing."""
        if os.getpid() == self._process and not self._file.closed:
            self._file.write(to_line(note))

    def line_of(self, frame: FrameType | None) -> str:
        """The innermost FILE:LINE, in a frame or its callers, that is not in a library; or ""."""
        return next(self._lines_of(frame), "")

    def callers(self) -> list[str]:
        """The script's lines on the stack above the current one, innermost first."""
        return [*islice(self._lines_of(sys._getframe(1)), 1, _MOST_CALLERS)]

    def _lines_of(self, frame: FrameType | None) -> Iterator[str]:
        while frame and frame is not self._outermost:
            name = frame.f_code.co_filename
            if not is_library(name):
                yield f"{name}:{frame.f_lineno}"
            frame = frame.f_back

    def timed(self, phase: str, function: Callable) -> Callable:
        """Wrap a function so that its seconds count for a phase."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> object:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent[phase] += time.perf_counter() - begin

        return call

    def end_at(self, limit: float) -> None:
        """After `limit` seconds note this rank's line and end it; at once if the audit is gone."""
        audit, until = os.getppid(), time.monotonic() + limit

        def end() -> None:
            while time.monotonic() < until:
                if os.getppid() != audit:  # it was killed
                    os.killpg(0, SIGKILL)
                time.sleep(0.2)
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            function, at = frame.f_code.co_name, self.line_of(frame)
            self.write(TimeUp(time=time.time(), at=at, function=function, limit=limit))
            time.sleep(3)  # so that the others can note their lines
            os._exit(124)

        threading.Thread(target=end, daemon=True).start()
