"""Note the state of models on this rank: weights and buffers of wrapped ones, and copies.

Each rank has one `ModelWatch`. Needs torch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tools.audit import notes
from ddp_tools.audit.copies import Copies, statistics_of
from ddp_tools.audit.digests import digest_of, sums_of, write_numbers
from ddp_tools.audit.notes import STEPS
from ddp_tools.audit.watch import hear
from ddp_tools.audit.writer import NoteWriter


class ModelWatch:
    """Finds wrapped models and copies of them, and notes their tensors on request."""

    def __init__(self, writer: NoteWriter) -> None:
        """Set the hooks."""
        self.models: list[DDP] = []
        self.copies = Copies(writer.line_of, self._note_tensors)
        self._writer = writer
        self._epoch_ended = False
        self._tests = 0  # passes at which buffers were noted
        hear(DDP, "__init__", after=self._wrapped)
        hear(torch.nn.Module, "train", before=self._told_mode)

    def epoch_ended(self) -> None:
        """Note the weights after an epoch of training."""
        self._note_weights("epoch", self.models)
        self.copies.look(self.models)
        self._epoch_ended = True

    def _wrapped(self, model: DDP, *_: object, **__: object) -> None:
        """Note that a model was wrapped, and its first weights."""
        self.models.append(model)
        layers = [type(layer).__name__ for layer in model.modules()]
        has_batch_norm = any("BatchNorm" in layer for layer in layers)
        broadcasts = model.broadcast_buffers
        self._writer.note(notes.Wrap, has_batch_norm=has_batch_norm, broadcasts=broadcasts)
        self._note_weights("begin", [model])

    def _told_mode(self, module: torch.nn.Module, mode: bool = True) -> None:
        """Note that a wrapped model is about to be tested."""
        if not mode and any(module in (model, model.module) for model in self.models):
            self._writer.note(notes.EvalMode, steps=self._writer.steps)

    def note_end(self) -> None:
        """Note the tensors of each wrapped model and of each copy at the end."""
        self._note_weights("end", self.models)
        for model in self.models:
            self._note_buffers(model, "end")
        self.copies.note_end()

    def _note_weights(self, when: str, models: list[DDP]) -> None:
        """Note the weights of wrapped models."""
        for model in models:
            parameters = dict(model.module.named_parameters())
            self._note_tensors(notes.Weights, when, self.models.index(model), parameters)

    def _note_tensors(
        self,
        record: type[notes.Tensors],
        when: str,
        number: int,
        tensors: Mapping[str, torch.Tensor],
        **fields: Any,
    ) -> None:
        """Note tensors by name; write their numbers at the end, and rank 0's also at the start."""
        writer, file = self._writer, ""
        at_begin = when == "begin" and writer.rank == "0" and record is notes.Weights
        if when == "end" or at_begin:
            path = writer.folder / f"rank{writer.rank}-{record.__name__}-{when}-{number}"
            file = write_numbers(path, tensors.values())
        writer.note(
            record,
            when=when,
            model=number,
            names=[*tensors],
            sums=sums_of(tensors.values()),
            bits=[digest_of(tensor) for tensor in tensors.values()],
            sizes=[tensor.numel() for tensor in tensors.values()],
            file=file,
            steps=writer.steps,
            **fields,
        )

    def _note_buffers(self, model: DDP, when: str) -> None:
        """Note the buffers of a model, without BatchNorm's if DDP broadcasts rank 0's.

        BatchNorm is left out because one rank's statistics are a known, accepted choice.
        """
        statistics = statistics_of(model.module) if model.broadcast_buffers else set()
        buffers = dict(model.module.named_buffers())
        buffers = {name: buffers[name] for name in buffers if name not in statistics}
        if buffers:
            transient = {*buffers} - {*model.module.state_dict()}
            number = self.models.index(model)
            self._note_tensors(notes.Buffers, when, number, buffers, transient=[*transient])

    def note_tested(self) -> None:
        """Note all buffers of models in eval mode, BatchNorm's included, when a pass starts."""
        for number, model in enumerate(self.models):
            buffers = dict(model.module.named_buffers())
            if buffers and not model.module.training and self._tests < STEPS:
                self._tests += 1
                self._note_tensors(notes.Buffers, "test", number, buffers)

    def look_at_buffers(self, model: DDP) -> None:
        """Note buffers before DDP broadcasts them: all ranks should have the same by then.

        If DDP does not broadcast them, only before an epoch: a script may reduce them itself.
        """
        if self._epoch_ended or (model.broadcast_buffers and 1 < self._writer.forwards <= STEPS):
            self._note_buffers(model, "epoch" if self._epoch_ended else "forward")
        self._epoch_ended = False
