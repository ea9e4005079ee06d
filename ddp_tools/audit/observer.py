"""Note what a script reads and writes on this rank, and how it ends: the audit's observer.

The audit's witness makes a `TrainingObserver` of it on every rank. It hears of loaders and of
torch.save through `watch.py`, and of files from Python. Needs torch.
"""

import functools
import inspect
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ddp_tools.audit import notes
from ddp_tools.audit.digests import (
    is_library,
    names_in,
    rng_digest,
    sample_digests,
)
from ddp_tools.audit.mirror import part
from ddp_tools.audit.notes import STEPS
from ddp_tools.audit.watch import LoaderPass, Watcher, replace_call

_TOOLS = ("logging", "hydra")  # whose files each rank of a right script may write
_MOST_NAMES = 2000  # of what is saved
_MOST_CALLERS = 5  # lines of the script that are noted of one call
_NOT_NOTED = ("/dev/", "/proc/")  # files below these


class ObservedPass(LoaderPass):
    """A pass over a loader, and what a judge wants to know of it."""

    def __init__(self, loader: DataLoader, begun: str) -> None:
        super().__init__(loader)
        self.begun = begun
        self.since = time.time()
        self.steps = 0
        drawn_by = loader.batch_sampler
        if drawn_by is None or type(drawn_by) is BatchSampler:
            drawn_by = loader.sampler
        # Whoever can be told the epoch means to give each an order of its own.
        promises = hasattr(drawn_by, "set_epoch") or isinstance(drawn_by, RandomSampler)
        self.shuffles = bool(getattr(drawn_by, "shuffle", promises))
        self.with_replacement = bool(getattr(drawn_by, "replacement", False))
        self.batch_size = loader.batch_size or 0
        self.digests: list[str] = []
        self.augmented: list[str] = []
        self.state_before = ""  # of the random numbers, where it is looked at
        self.asked = 0.0  # when the script asked for a batch

    def own_size(self) -> int | None:
        """Count the samples of the loader's own dataset; None where it has no length."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def undivided(self) -> tuple[int, bool]:
        """Tell the undivided dataset from others of this rank, and whether this is a part of it."""
        subsets = self._subsets()
        return id(subsets[-1].dataset if subsets else self.dataset), bool(subsets)


class Observer(Watcher[ObservedPass]):
    """Writes a note of all that a script does on this rank, at once: none is lost with the rank."""

    def __init__(self, folder: Path, outermost: FrameType) -> None:
        """Open the file of notes; outermost: the frame that runs the script."""
        super().__init__()
        self.rank = os.environ.get("RANK", "0")
        self.steps = 0  # of optimizers
        self.spent: dict[str, float] = defaultdict(float)  # seconds since the last step, by phase
        self._first_save = 0  # after which step
        self._datasets: list[object] = []  # kept, so that no other gets the id of one that is gone
        self._process = os.getpid()
        self._parting = False  # a file from the folder of --cwd
        self._folder = folder
        self._file = (folder / f"rank{self.rank}.jsonl").open("w", buffering=1)
        self._outermost = outermost
        (folder / f"rank{self.rank}.pid").write_text(str(self._process))

    def start(self) -> None:
        """Note from now on, until the process ends."""
        super().start()
        sys.addaudithook(self._heard_event)
        replace_call(dist, "init_process_group", self._observed_join)
        replace_call(dist.distributed_c10d, "init_process_group", lambda _: dist.init_process_group)

    def write(self, note: notes.Note) -> None:
        """Write a note; a loader's worker, which has this file too, writes none."""
        if os.getpid() == self._process and not self._file.closed:
            self._file.write(notes.to_line(note))

    def here(self) -> dict[str, Any]:
        """The time, and the line of the script: what each note begins with."""
        return {"time": time.time(), "at": self.line_of(sys._getframe(1))}

    def line_of(self, frame: FrameType | None) -> str:
        """FILE:LINE of the script, or of what lies beside it, in a frame or its callers; or ""."""
        return next(self._lines_of(frame), "")

    def callers(self) -> list[str]:
        """The lines of the script that have called that of `here`, from the innermost on."""
        return [*islice(self._lines_of(sys._getframe(1)), 1, _MOST_CALLERS)]

    def _lines_of(self, frame: FrameType | None) -> Iterator[str]:
        while frame and frame is not self._outermost:
            name = frame.f_code.co_filename
            if not is_library(name):
                yield f"{name}:{frame.f_lineno}"
            frame = frame.f_back

    def _observed_join(self, join: Callable) -> Callable:
        """init_process_group that notes what it is given, and ends a rank that takes another's."""
        signature = inspect.signature(join)
        launched = int(self.rank), int(os.environ["WORLD_SIZE"])

        @functools.wraps(join)
        def call(*args: Any, **options: Any) -> None:
            given = signature.bind(*args, **options).arguments
            rank = _given_number(given.get("rank"), "RANK", launched[0])
            world_size = _given_number(given.get("world_size"), "WORLD_SIZE", launched[1])
            self.write(notes.Join(**self.here(), rank=rank, world_size=world_size))
            if (rank, world_size) != launched:  # who would wait until the limit
                sys.exit("the ranks of init_process_group are not those of the launch")
            join(*args, **options)

        return call

    # ---- loaders

    def new_pass(self, loader: DataLoader) -> ObservedPass:
        """Make the record of a pass that begins."""
        self._datasets.append(loader.dataset)
        return ObservedPass(loader, self.line_of(sys._getframe(1)))

    def before_batch(self, loader_pass: ObservedPass) -> None:
        """Look at the clock, and at the random numbers before the second and the third batch."""
        loader_pass.asked = time.perf_counter()
        looks = loader_pass.batches in (1, 2)
        loader_pass.state_before = rng_digest() if looks else ""

    def after_batch(self, loader_pass: ObservedPass, batch: object) -> None:
        """Keep how long it took, whether random numbers were used, and the samples' digests."""
        self.spent["loading"] += time.perf_counter() - loader_pass.asked
        state = loader_pass.state_before
        if state and rng_digest() != state:
            loader_pass.augmented.append(state)
        if loader_pass.iterable or loader_pass.batches <= STEPS:
            loader_pass.digests.extend(sample_digests(batch))

    def after_pass(self, loader_pass: ObservedPass) -> None:
        """Note which samples a pass gave: numbers in the undivided dataset, or digests."""
        iterable = loader_pass.iterable
        dataset, is_part = loader_pass.undivided()
        note = notes.Pass(
            **self.here(),
            begun=loader_pass.begun,
            since=loader_pass.since,
            dataset_size=loader_pass.dataset_size(),
            own_size=loader_pass.own_size(),
            is_part=is_part,
            dataset=dataset,
            iterable=iterable,
            sampler=type(loader_pass.sampler).__name__,
            shuffles=loader_pass.shuffles,
            with_replacement=loader_pass.with_replacement,
            batch_size=loader_pass.batch_size,
            batches=loader_pass.batches,
            complete=loader_pass.complete,
            steps=loader_pass.steps,
            samples=loader_pass.digests if iterable else loader_pass.indices(),
            digests=loader_pass.digests,
            augmented=loader_pass.augmented,
        )
        self.write(note)

    # ---- files

    def before_save(self, saved: object, file: object) -> None:
        """Note the names in what is saved, and the file."""
        names = [*names_in(saved)][:_MOST_NAMES]
        self.write(notes.Save(**self.here(), names=names, wrapper=isinstance(saved, DDP)))
        self._first_save = self._first_save or self.steps
        if isinstance(file, str | os.PathLike):
            self._part(file, empties=True)  # of what C++ opens Python does not tell
            self.write(notes.FileWritten(**self.here(), path=str(Path(file).absolute())))

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
        ours = file.startswith((*_NOT_NOTED, str(self._folder))) or "__pycache__" in file
        if not ours:
            names = {name.partition(".")[0] for name in callers}
            tool = next((name for name in _TOOLS if name in names), "")
            self.write(notes.FileWritten(**self.here(), path=file, tool=tool))

    # ---- ends

    def end_if_asked(self) -> None:
        """End all ranks, two steps after the first save, if this rank was started to do so."""
        ends_ranks = os.environ.get("DDP_AUDIT_STOP") == os.environ.get("RANK")
        if ends_ranks and 0 < self._first_save < self.steps - 2:
            self._end_all_ranks()

    def end_at(self, limit: float) -> None:
        """After so many seconds note where this rank is, and end it; at once without the audit."""
        audit, until = os.getppid(), time.monotonic() + limit

        def end() -> None:
            while time.monotonic() < until:
                if os.getppid() != audit:  # it was killed
                    os.killpg(0, signal.SIGKILL)
                time.sleep(0.2)
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            function, at = frame.f_code.co_name, self.line_of(frame)
            self.write(notes.TimeUp(time=time.time(), at=at, function=function))
            time.sleep(3)  # the others have time to note theirs
            os._exit(124)

        threading.Thread(target=end, daemon=True).start()

    def _end_all_ranks(self) -> None:
        """End all ranks at once; one rank calls it, and ends last."""
        self.write(notes.Stopped(**self.here()))
        for path in sorted(self._folder.glob("rank*.pid"), reverse=True):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _given_number(value: object, variable: str, launched: int) -> int:
    """What init_process_group takes: its argument, or what the script has left in the environment.

    launched: what the launcher said, if the script has taken that away.
    """
    if isinstance(value, int) and value >= 0:
        return value
    return int(os.environ.get(variable, launched))


def _modules_of(frame: FrameType | None, most: int = 8) -> set[str]:
    """The names of the modules in which the innermost frames are."""
    names = set()
    while frame and most:
        names.add(str(frame.f_globals.get("__name__", "")))
        frame, most = frame.f_back, most - 1
    return names
