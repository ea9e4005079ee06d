"""Note what models hold on this rank: weights and buffers of wrapped ones, and copies of them.

The audit's `TrainingObserver` is one. Needs torch.
"""

from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tools.audit import notes
from ddp_tools.audit.copies import Copies, statistics_of
from ddp_tools.audit.digests import digest_of, sums_of, write_numbers
from ddp_tools.audit.notes import STEPS
from ddp_tools.audit.observer import ObservedPass, Observer


class ModelObserver(Observer):
    """Observes wrapped models besides."""

    def __init__(self, folder: Path, outermost: FrameType) -> None:
        super().__init__(folder, outermost)
        self.models: list[DDP] = []
        self.copies = Copies(self.line_of, self.note_tensors)
        self.forwards = 0  # calls of models
        self._epoch_ended = False

    def start(self) -> None:
        """Note from now on, until the process ends."""
        super().start()
        self.copies.watch()

    def after_pass(self, loader_pass: ObservedPass) -> None:
        """Note the samples of a pass, and after an epoch the weights."""
        super().after_pass(loader_pass)
        if loader_pass.steps and loader_pass.complete:
            self.note_weights("epoch", self.models)
            self.copies.look(self.models)
            self._epoch_ended = True

    def after_wrap(self, model: DDP) -> None:
        """Note that a model was wrapped, and its first weights."""
        self.models.append(model)
        layers = [type(layer).__name__ for layer in model.modules()]
        note = notes.Wrap(
            **self.here(),
            has_batch_norm=any("BatchNorm" in layer for layer in layers),
            broadcasts=model.broadcast_buffers,
        )
        self.write(note)
        self.note_weights("begin", [model])

    def note_end(self) -> None:
        """Note what each wrapped model and each copy of one has at the end."""
        self.note_weights("end", self.models)
        for model in self.models:
            self._note_buffers(model, "end")
        self.copies.note_end()

    def note_weights(self, when: str, models: list[DDP]) -> None:
        """Note the weights of wrapped models."""
        for model in models:
            parameters = dict(model.module.named_parameters())
            self.note_tensors(notes.Weights, when, self.models.index(model), parameters)

    def note_tensors(
        self,
        record: type[notes.Tensors],
        when: str,
        number: int,
        tensors: Mapping[str, torch.Tensor],
        **fields: Any,
    ) -> None:
        """Note tensors by name; at the end also all their numbers, and on rank 0 at the begin."""
        file = ""
        if when == "end" or (when == "begin" and self.rank == "0" and record is notes.Weights):
            path = self._folder / f"rank{self.rank}-{record.__name__}-{when}-{number}.f32"
            write_numbers(path, tensors.values())
            file = str(path)
        note = record(
            **self.here(),
            when=when,
            model=number,
            names=[*tensors],
            sums=sums_of(tensors.values()),
            bits=[digest_of(tensor) for tensor in tensors.values()],
            sizes=[tensor.numel() for tensor in tensors.values()],
            file=file,
            steps=self.steps,
            **fields,
        )
        self.write(note)

    def _note_buffers(self, model: DDP, when: str) -> None:
        """Note the buffers of a model; where DDP broadcasts them, those of BatchNorm are rank 0's.

        Everybody knows that of BatchNorm: one rank's statistics will do.
        """
        statistics = statistics_of(model.module) if model.broadcast_buffers else set()
        buffers = dict(model.module.named_buffers())
        buffers = {name: buffers[name] for name in buffers if name not in statistics}
        if buffers:
            transient = {*buffers} - {*model.module.state_dict()}
            number = self.models.index(model)
            self.note_tensors(notes.Buffers, when, number, buffers, transient=[*transient])

    def look_at_buffers(self, model: DDP) -> None:
        """Note buffers before DDP broadcasts them: then all ranks should have the same.

        Those that it does not broadcast, before an epoch: a script may bring them together itself.
        """
        if self._epoch_ended or (model.broadcast_buffers and 1 < self.forwards <= STEPS):
            self._note_buffers(model, "epoch" if self._epoch_ended else "forward")
        self._epoch_ended = False
