"""Observe a script on this rank: set the hooks of the audit, and note passes and file writes.

Each rank has one `Observer`, made before its script starts. Needs torch.
"""

import os
import sys
import time
from pathlib import Path
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tools.audit import notes
from ddp_tools.audit.call_watch import CallWatch
from ddp_tools.audit.digests import names_in, rng_digest, sample_digests
from ddp_tools.audit.interrupt import Interruption
from ddp_tools.audit.mirror import part
from ddp_tools.audit.model_watch import ModelWatch
from ddp_tools.audit.notes import STEPS
from ddp_tools.audit.training_watch import TrainingWatch
from ddp_tools.audit.watch import LoaderPass, LoaderWatch, hear
from ddp_tools.audit.writer import NoteWriter

_TOOLS = ("logging", "hydra")  # in a correct script all ranks may write their files
_MOST_NAMES = 2000  # of saved dictionaries
_NOT_NOTED = ("/dev/", "/proc/")  # files below these


class Observer:
    """Writes notes on a script's calls and files on this rank."""

    def __init__(self, folder: Path, outermost: FrameType) -> None:
        """Set all hooks; outermost: the frame that runs the script."""
        self.writer = NoteWriter(folder, outermost)
        self._datasets: list[object] = []  # kept alive, so that no id is used twice
        self._loaders = LoaderWatch(self._ended, self._begun, self._asked, self._given)
        self._models = ModelWatch(self.writer)
        CallWatch(self.writer)
        self._interruption = Interruption(self.writer)
        watches = (self._loaders, self._models, self._interruption)
        self._training = TrainingWatch(self.writer, *watches)
        self._state_given = ""  # of the generator after a loader's last batch
        self._parting = False  # whether a file of --cwd is being copied
        self._save = torch.save  # the original, without a hook
        hear(torch, "save", before=self._before_save)
        sys.addaudithook(self._heard_event)

    def note_end(self) -> None:
        """Write the last notes at the end of the script."""
        self._loaders.close()
        self._models.note_end()
        self._training.note_end()

    # ---- loaders

    def _begun(self, loader_pass: LoaderPass) -> None:
        """Keep the line at which a pass starts."""
        self._state_given = ""  # a loader draws a number when a pass starts
        self._datasets.append(loader_pass.dataset)
        loader_pass.begun = self.writer.line_of(sys._getframe(1))
        self._models.note_tested()

    def _asked(self, loader_pass: LoaderPass) -> None:
        """Read the clock, and the generator's state before the second and the third batch."""
        looks = loader_pass.batches in (1, 2)
        now = rng_digest() if looks or self._state_given else ""
        if self._state_given not in ("", now):
            self.writer.note(notes.RandomUse, state=self._state_given, in_loop=True)
        loader_pass.asked = time.perf_counter()
        loader_pass.state_before = now if looks else ""

    def _given(self, loader_pass: LoaderPass, batch: object) -> None:
        """Keep the loading time, whether random numbers were drawn, and the samples' digests."""
        self.writer.spent["loading"] += time.perf_counter() - loader_pass.asked
        self._state_given = rng_digest() if loader_pass.batches <= STEPS else ""
        if loader_pass.state_before not in ("", self._state_given):
            loader_pass.augmented.append(loader_pass.state_before)
        if loader_pass.iterable or loader_pass.batches <= STEPS:
            loader_pass.digests.extend(sample_digests(batch))

    def _ended(self, loader_pass: LoaderPass) -> None:
        """Note the samples of a pass: indices in the undivided dataset, or a stream's digests."""
        iterable, dataset = loader_pass.iterable, loader_pass.dataset
        undivided, is_part = loader_pass.undivided()
        self.writer.note(
            notes.Pass,
            begun=loader_pass.begun,
            since=loader_pass.since,
            dataset_size=None if iterable else len(undivided),
            own_size=len(dataset) if hasattr(dataset, "__len__") else None,
            is_part=is_part,
            dataset=id(undivided),
            iterable=iterable,
            sampler=type(loader_pass.sampler).__name__,
            shuffles=loader_pass.shuffles(),
            with_replacement=bool(getattr(loader_pass.drawn_by, "replacement", False)),
            batch_size=loader_pass.batch_size,
            batches=loader_pass.batches,
            complete=loader_pass.complete,
            steps=loader_pass.steps,
            samples=loader_pass.digests if iterable else loader_pass.indices(),
            digests=loader_pass.digests,
            augmented=loader_pass.augmented,
        )
        if loader_pass.steps and loader_pass.complete:
            self._models.epoch_ended()

    # ---- files

    def _before_save(self, obj: object, f: object, *_: object, **__: object) -> None:
        """Note the keys of a torch.save and its file."""
        names = [*names_in(obj)][:_MOST_NAMES]
        self.writer.note(notes.Save, names=names, wrapper=isinstance(obj, DDP))
        if isinstance(f, str | os.PathLike):
            self._part(f, empties=True)  # torch opens it in C++, without an audit event
            self.writer.note(notes.FileWritten, path=str(Path(f).absolute()))
        self._interruption.before_save(self._save, obj, f)

    def _part(self, file: str | bytes | os.PathLike, empties: bool) -> None:
        """Replace a link into --cwd with a copy, without noting the files that this opens."""
        self._parting = True
        try:
            part(Path(os.fsdecode(file)), empties)
        finally:
            self._parting = False

    def _heard_event(self, event: str, arguments: tuple) -> None:
        """Note a file that is opened for writing or renamed, as an audit hook of Python."""
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
        if "tempfile" in callers:  # it also tests whether a folder is writable
            return
        file = str(Path(os.fsdecode(path)).absolute())
        ours = file.startswith((*_NOT_NOTED, str(self.writer.folder))) or "__pycache__" in file
        if not ours:
            self._interruption.before_open(Path(file))
            names = {name.partition(".")[0] for name in callers}
            tool = next((name for name in _TOOLS if name in names), "")
            self.writer.note(notes.FileWritten, path=file, tool=tool)


def _modules_of(frame: FrameType | None, most: int = 8) -> set[str]:
    """The names of the modules of the innermost frames."""
    names = set()
    while frame and most:
        names.add(str(frame.f_globals.get("__name__", "")))
        frame, most = frame.f_back, most - 1
    return names
