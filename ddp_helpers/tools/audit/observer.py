"""Note what a script does on this rank: the audit's witness makes an Observer on every rank.

It hears of loaders, wrapped models and torch.save through `rank/watch.py`, and replaces the calls
of collectives, forward passes, optimizers and files by itself. Needs torch.
"""

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from ddp_helpers.rank.watch import LoaderPass, Watcher, replace_call
from ddp_helpers.tools.audit import notes
from ddp_helpers.tools.audit.digests import (
    is_library,
    names_in,
    rng_digest,
    sample_digests,
    sums_of,
    weights_digest,
)
from ddp_helpers.tools.audit.notes import STEPS

# What ranks call to talk to each other; the second, only two of them.
_PAIRS = "i?send|i?recv|batch_isend"
_ALL = "all_|broadcast|barrier|monitored|reduce(?!_op)|gather|scatter"
_COMMUNICATION = re.compile(f"{_ALL}|{_PAIRS}")
_POINT_TO_POINT = re.compile(_PAIRS)
_FORWARDS = 10 * STEPS  # calls of models before which random numbers are looked at
_MOST_NAMES = 2000  # of what is saved
_NOT_NOTED = ("/dev/", "/proc/")  # files below these


class ObservedPass(LoaderPass):
    """A pass over a loader, and what a judge wants to know of it."""

    def __init__(self, loader: DataLoader, begun: str) -> None:
        super().__init__(loader)
        self.begun = begun
        self.since = time.time()
        self.steps = 0
        self.shuffles = bool(getattr(loader.sampler, "shuffle", False))
        self.batch_size = loader.batch_size or 0
        self.digests: list[str] = []
        self.augmented: list[str] = []
        self.state_before = ""  # of the random numbers, where it is looked at


class Observer(Watcher[ObservedPass]):
    """Writes a note of all that a script does on this rank, at once: none is lost with the rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.rank = os.environ.get("RANK", "0")
        self.models: list[DDP] = []
        self.steps = 0  # of optimizers
        self._forwards = 0
        self._first_save = 0  # after which step
        self._in_communication = False  # which may call others
        self._stepping: Optimizer | None = None
        self._process = os.getpid()
        self._folder = folder
        self._file = (folder / f"rank{self.rank}.jsonl").open("w", buffering=1)
        self._outermost = sys._getframe(1)
        (folder / f"rank{self.rank}.pid").write_text(str(self._process))

    def start(self) -> None:
        """Note from now on, until the process ends."""
        super().start()
        self._hook_communication()
        self._hook_forward()
        self._hook_optimizers()
        sys.addaudithook(self._heard_event)

    def write(self, note: notes.Note) -> None:
        """Write a note; a loader's worker, which has this file too, writes none."""
        if os.getpid() == self._process and not self._file.closed:
            self._file.write(notes.to_line(note))

    def here(self) -> dict[str, Any]:
        """The time, and the line of the script: what each note begins with."""
        return {"time": time.time(), "at": self.line_of(sys._getframe(1))}

    def line_of(self, frame: FrameType | None) -> str:
        """FILE:LINE of the script, or of what lies beside it, in a frame or its callers; or ""."""
        while frame and frame is not self._outermost:
            name = frame.f_code.co_filename
            if not is_library(name):
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # ---- loaders

    def new_pass(self, loader: DataLoader) -> ObservedPass:
        """Make the record of a pass that begins."""
        return ObservedPass(loader, self.line_of(sys._getframe(1)))

    def before_batch(self, loader_pass: ObservedPass) -> None:
        """Look at the random numbers before the second and the third batch."""
        looks = loader_pass.batches in (1, 2)
        loader_pass.state_before = rng_digest() if looks else ""

    def after_batch(self, loader_pass: ObservedPass, batch: object) -> None:
        """Keep whether random numbers were used, and the digests of the samples."""
        state = loader_pass.state_before
        if state and rng_digest() != state:
            loader_pass.augmented.append(state)
        if loader_pass.iterable or loader_pass.batches <= STEPS:
            loader_pass.digests.extend(sample_digests(batch))

    def after_pass(self, loader_pass: ObservedPass) -> None:
        """Note which samples a pass gave: numbers in the undivided dataset, or digests."""
        iterable = loader_pass.iterable
        note = notes.Pass(
            **self.here(),
            begun=loader_pass.begun,
            since=loader_pass.since,
            dataset_size=loader_pass.dataset_size(),
            iterable=iterable,
            sampler=type(loader_pass.sampler).__name__,
            shuffles=loader_pass.shuffles,
            batch_size=loader_pass.batch_size,
            batches=loader_pass.batches,
            complete=loader_pass.complete,
            steps=loader_pass.steps,
            samples=loader_pass.digests if iterable else loader_pass.indices(),
            digests=loader_pass.digests,
            augmented=loader_pass.augmented,
        )
        self.write(note)
        if loader_pass.steps and loader_pass.complete:
            self.note_weights("epoch")

    # ---- models and optimizers

    def after_wrap(self, model: DDP) -> None:
        """Note that a model was wrapped, and its first weights."""
        self.models.append(model)
        layers = [type(layer).__name__ for layer in model.modules()]
        has_batch_norm = any("BatchNorm" in layer for layer in layers)
        self.write(notes.Wrap(**self.here(), has_batch_norm=has_batch_norm))
        self.note_weights("begin")

    def note_weights(self, when: str) -> None:
        """Note the weights of each wrapped model."""
        for number, model in enumerate(self.models):
            parameters = dict(model.module.named_parameters())
            note = notes.Weights(
                **self.here(),
                when=when,
                model=number,
                names=[*parameters],
                sums=sums_of(parameters.values()),
                bits=[weights_digest(parameters.values())],
            )
            self.write(note)

    def _hook_forward(self) -> None:
        """Note what DDP's forward sends, and whether the model uses random numbers."""

        def observed(forward: Callable) -> Callable:
            def call(model: DDP, *args: Any, **options: Any) -> object:
                averages = torch.is_grad_enabled() and model.require_backward_grad_sync
                has_buffers = any(True for _ in model.buffers())
                if averages or (model.broadcast_buffers and has_buffers):
                    self.write(notes.Collective(**self.here(), name="DDP's forward"))
                self._forwards += 1
                state = rng_digest() if self._forwards <= _FORWARDS else ""
                output = forward(model, *args, **options)
                if state and torch.is_grad_enabled() and rng_digest() != state:
                    self.write(notes.RandomUse(**self.here(), state=state))
                return output

            return call

        replace_call(DDP, "forward", observed)

    def _hook_optimizers(self) -> None:
        """Note the gradients at each step of an optimizer."""

        def before_step(optimizer: Optimizer, *_: object) -> None:
            # ZeroRedundancyOptimizer steps one of its own, for its share of the weights.
            if self._stepping:
                return
            self._stepping = optimizer
            for loader_pass in self.open_passes:
                loader_pass.steps += 1
            self.steps += 1
            if self.steps <= STEPS:
                self._note_step(optimizer)
            ends_ranks = os.environ.get("DDP_AUDIT_STOP") == os.environ.get("RANK")
            if ends_ranks and 0 < self._first_save < self.steps - 2:
                self._end_all_ranks()

        def after_step(optimizer: Optimizer, *_: object) -> None:
            if self._stepping is optimizer:
                self._stepping = None

        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)

    def _note_step(self, optimizer: Optimizer) -> None:
        """Note the gradients of wrapped models that an optimizer is about to use."""
        wrapped = {id(weights) for model in self.models for weights in model.parameters()}
        stepped = [weights for group in optimizer.param_groups for weights in group["params"]]
        ours = [weights for weights in stepped if id(weights) in wrapped]
        gradients = [weights.grad for weights in ours if weights.grad is not None]
        dense = [gradient for gradient in gradients if not gradient.is_sparse]
        note = notes.Step(
            **self.here(),
            sums=sums_of(dense),
            forwards=self._forwards,
            wrapped_parameters=len(ours),
        )
        self.write(note)

    # ---- collectives

    def _hook_communication(self) -> None:
        """Note each collective, and what is sent from rank to rank, in order."""

        def observed(name: str, communicate: Callable) -> Callable:
            @functools.wraps(communicate)
            def call(*args: Any, **options: Any) -> object:
                if self._in_communication:
                    return communicate(*args, **options)
                self._note_communication(name, [*args, *options.values()])
                self._in_communication = True
                try:
                    return communicate(*args, **options)
                finally:
                    self._in_communication = False

            return call

        for name in filter(_COMMUNICATION.match, distributed_c10d.__all__):
            call = observed(name, getattr(distributed_c10d, name))
            setattr(dist, name, call)
            setattr(distributed_c10d, name, call)

    def _note_communication(self, name: str, arguments: list[object]) -> None:
        """Note a call by which ranks talk to each other, with the size of its first tensor."""
        groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        size = [*tensors[0].shape] if tensors else None
        kind: type[notes.Communication] = notes.Collective
        if groups and groups[0] is not dist.group.WORLD:
            kind = notes.GroupCollective
        if _POINT_TO_POINT.match(name):
            kind = notes.PointToPoint
        self.write(kind(**self.here(), name=name, size=size))

    # ---- files

    def before_save(self, saved: object, file: object) -> None:
        """Note the names in what is saved, and the file."""
        names = [*names_in(saved)][:_MOST_NAMES]
        self.write(notes.Save(**self.here(), names=names, wrapper=isinstance(saved, DDP)))
        self._first_save = self._first_save or self.steps
        if isinstance(file, str | os.PathLike):
            self.write(notes.FileWritten(**self.here(), path=str(Path(file).absolute())))

    def _heard_event(self, event: str, arguments: tuple) -> None:
        """Note a file that is opened to write, or renamed: Python tells of each, pathlib's too."""
        path: str | bytes = ""
        if event == "open" and isinstance(arguments[0], str | bytes):
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR)
            path = arguments[0] if writes else ""
        elif event == "os.rename":
            path = arguments[1]
        if not path:
            return
        file = str(Path(os.fsdecode(path)).absolute())
        ours = file.startswith((*_NOT_NOTED, str(self._folder))) or "__pycache__" in file
        if not ours:
            self.write(notes.FileWritten(**self.here(), path=file))

    # ---- ends

    def end_at(self, limit: float) -> None:
        """After so many seconds, note where this rank is, and end it."""

        def end() -> None:
            time.sleep(limit)
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
