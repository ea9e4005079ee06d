"""Note which files a script writes on this rank, and what it saves.

The audit's observer has one `FileWatch`. Needs torch.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tools.audit import notes
from ddp_tools.audit.digests import names_in
from ddp_tools.audit.mirror import part
from ddp_tools.audit.watch import hear
from ddp_tools.audit.writer import NoteWriter

_TOOLS = ("logging", "hydra")  # whose files each rank of a right script may write
_MOST_NAMES = 2000  # of what is saved
_NOT_NOTED = ("/dev/", "/proc/")  # files below these


class FileWatch:
    """Hears of torch.save, and from Python of each file."""

    def __init__(self, writer: NoteWriter) -> None:
        """Listen from now on."""
        self._writer = writer
        self._first_save = 0  # after which step
        self._parting = False  # a file from the folder of --cwd
        hear(torch, "save", before=self._before_save)
        sys.addaudithook(self._heard_event)

    def _before_save(self, obj: object, f: object, *_: object, **__: object) -> None:
        """Note the names in what is saved, and the file."""
        names = [*names_in(obj)][:_MOST_NAMES]
        self._writer.note(notes.Save, names=names, wrapper=isinstance(obj, DDP))
        self._first_save = self._first_save or self._writer.steps
        if isinstance(f, str | os.PathLike):
            self._part(f, empties=True)  # of what C++ opens Python does not tell
            self._writer.note(notes.FileWritten, path=str(Path(f).absolute()))

    def _part(self, file: str | bytes | os.PathLike, empties: bool) -> None:
        """Part a file from the folder of --cwd, without noting the files that this opens."""
        self._parting = True
        try:
            part(Path(os.fsdecode(file)), empties)
        finally:
            self._parting = False

    def _heard_event(self, event: str, arguments: tuple) -> None:
        """Note a file that is opened to write, or renamed: Python tells of each, pathlib's too."""
        path: str | bytes = ""
        if event == "open" and isinstance(arguments[0], str | bytes):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
            path = arguments[0] if writes else ""
        elif event == "os.rename":
            path = arguments[1]
        if not path or self._parting:
            return
        if event == "open":
            self._part(path, empties=bool(arguments[2] & os.O_TRUNC))
        callers = _modules_of(sys._getframe(1))
        if "tempfile" in callers:  # also it tries whether a folder can be written
            return
        file = str(Path(os.fsdecode(path)).absolute())
        ours = file.startswith((*_NOT_NOTED, str(self._writer.folder))) or "__pycache__" in file
        if not ours:
            names = {name.partition(".")[0] for name in callers}
            tool = next((name for name in _TOOLS if name in names), "")
            self._writer.note(notes.FileWritten, path=file, tool=tool)

    def end_if_asked(self) -> None:
        """End all ranks, two steps after the first save, if this rank was started to do so."""
        writer = self._writer
        if os.environ.get("DDP_AUDIT_STOP") != os.environ.get("RANK"):
            return
        if 0 < self._first_save < writer.steps - 2:
            writer.note(notes.Stopped)
            for path in sorted(writer.folder.glob("rank*.pid"), reverse=True):  # this one ends last
                os.kill(int(path.read_text()), signal.SIGKILL)


def _modules_of(frame: FrameType | None, most: int = 8) -> set[str]:
    """The names of the modules in which the innermost frames are."""
    names = set()
    while frame and most:
        names.add(str(frame.f_globals.get("__name__", "")))
        frame, most = frame.f_back, most - 1
    return names
