"""Note a script's training on this rank: forward and backward passes, steps, time per phase.

Each rank has one `TrainingWatch`. Needs torch.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_tools.audit import notes
from ddp_tools.audit.digests import inputs_digest, rng_digest, sums_of
from ddp_tools.audit.interrupt import Interruption
from ddp_tools.audit.loss_terms import divisor_of
from ddp_tools.audit.model_watch import ModelWatch
from ddp_tools.audit.notes import STEPS
from ddp_tools.audit.watch import LoaderWatch, replace_call
from ddp_tools.audit.writer import NoteWriter

_FORWARDS = 10 * STEPS  # calls of models at which the generator's state is compared
_MOST_NOT_FINITE = 5  # notes: later outputs are not finite either


class TrainingWatch:
    """Notes forward passes of wrapped models, backward passes and steps of optimizers."""

    def __init__(
        self,
        writer: NoteWriter,
        loaders: LoaderWatch,
        models: ModelWatch,
        interruption: Interruption,
    ) -> None:
        """Set the hooks."""
        self._writer, self._loaders, self._models = writer, loaders, models
        self._interruption = interruption
        self._not_finite = 0
        self._in_backward = False
        self._stepping: Optimizer | None = None
        self._synced: dict[int, bool] = {}  # by model: whether its last forward set up averaging
        self._sync_changed = self._scheduling = False
        self._schedule_calls = self._idle = 0
        self._last_step = time.perf_counter()
        self._hook_forward()
        self._hook_backward()
        self._hook_optimizers()
        for kind in (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler):
            replace_call(kind, "step", self._count_schedule)

    def note_end(self) -> None:
        """Note the number of scheduler steps, if there were any."""
        if self._schedule_calls:
            counts = {"steps": self._writer.steps, "idle": self._idle}
            self._writer.note(notes.Schedule, calls=self._schedule_calls, **counts)

    def _count_schedule(self, step: Callable) -> Callable:
        """Count a step of a scheduler, but no step of a scheduler inside it."""

        @functools.wraps(step)
        def call(*args: Any, **options: Any) -> object:
            if self._scheduling:
                return step(*args, **options)
            self._scheduling = True
            self._schedule_calls += 1
            try:
                return step(*args, **options)
            finally:
                self._scheduling = False

        return call

    def _hook_forward(self) -> None:
        """Note DDP's forward: whether it communicates, its inputs, its use of random numbers."""
        writer = self._writer

        def observed(forward: Callable) -> Callable:
            def call(model: DDP, *args: Any, **options: Any) -> object:
                trains = torch.is_grad_enabled()
                averages = trains and model.require_backward_grad_sync
                has_buffers = any(True for _ in model.buffers())
                if averages or (model.broadcast_buffers and has_buffers):
                    name = "DDP's forward" if trains else "DDP's forward, to test,"
                    writer.note(notes.Collective, name=name)
                writer.forwards += 1
                if trains:
                    self._models.look_at_buffers(model)
                    self._synced[id(model)] = model.require_backward_grad_sync
                if trains and writer.forwards <= STEPS:
                    digest = inputs_digest([*args, *options.values()])
                    writer.note(notes.Inputs, digest=digest)
                state = rng_digest() if writer.forwards <= _FORWARDS else ""
                output = forward(model, *args, **options)
                if state and trains and rng_digest() != state:
                    writer.note(notes.RandomUse, state=state)
                if trains:
                    self._look_whether_finite("output", [output])
                return output

            return call

        replace_call(DDP, "forward", observed)
        # Time only the inner model: DDP's own part may wait for other ranks.
        if hasattr(DDP, "_run_ddp_forward"):
            replace_call(DDP, "_run_ddp_forward", functools.partial(writer.timed, "forward"))

    def _look_whether_finite(self, what: str, tensors: Iterable[object]) -> None:
        """Note an output, or a loss, that is not finite."""
        if self._not_finite >= _MOST_NOT_FINITE:
            return
        for value in tensors:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if not bool(torch.isfinite(value.detach()).all()):
                self._not_finite += 1
                self._writer.note(notes.NotFinite, what=what, steps=self._writer.steps)

    def _hook_backward(self) -> None:
        """Note a loss's divisor, and a loss that is not finite; time backward, waiting included."""

        def observed(backward: Callable) -> Callable:
            timed = self._writer.timed("backward", backward)

            @functools.wraps(backward)
            def call(*args: Any, **options: Any) -> object:
                if self._in_backward:  # of checkpointed layers
                    return backward(*args, **options)
                tensors = args[0] if args else options.get("tensors")
                self._look_whether_finite("loss", [tensors])
                if self._writer.steps < STEPS and (divisor := divisor_of(tensors)):
                    self._writer.note(notes.Loss, divisor=divisor)
                for model in self._models.models:
                    now = model.require_backward_grad_sync
                    self._sync_changed |= self._synced.get(id(model), now) != now
                self._in_backward = True
                try:
                    return timed(*args, **options)
                finally:
                    self._in_backward = False

            return call

        replace_call(torch.autograd, "backward", observed)

    def _hook_optimizers(self) -> None:
        """Note gradients and weights before each step of an optimizer."""
        writer = self._writer

        def before_step(optimizer: Optimizer, *_: object) -> None:
            # ZeroRedundancyOptimizer steps an inner optimizer for its shard of the weights.
            if self._stepping:
                return
            self._stepping = optimizer
            if not any(group.get("lr", 1) != 0 for group in optimizer.param_groups):
                if not writer.steps:
                    return  # a step at rate 0 that warms up DDP or a compiler
                self._idle += 1
            for loader_pass in self._loaders.open_passes:
                loader_pass.steps += 1
            writer.steps += 1
            if writer.steps in (1, 2, STEPS):
                self._models.copies.look(self._models.models)
            if writer.steps <= STEPS:
                self._note_step(optimizer)
            self._interruption.before_step()

        def after_step(optimizer: Optimizer, *_: object) -> None:
            if self._stepping is optimizer:
                self._stepping = None
                writer.spent.clear()
                self._last_step = time.perf_counter()

        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)

    def _note_step(self, optimizer: Optimizer) -> None:
        """Note an optimizer's gradients, weights and rates, and the seconds since the last step."""
        whole = time.perf_counter() - self._last_step
        seconds = {phase: self._writer.spent[phase] for phase in ("loading", "forward")}
        seconds["own code"] = whole - sum(self._writer.spent.values())
        wrapped = {id(weights) for model in self._models.models for weights in model.parameters()}
        stepped = [weights for group in optimizer.param_groups for weights in group["params"]]
        sharded = any(map(_is_shard, stepped))
        whole_ones = [] if sharded else stepped
        ours = [weights for weights in whole_ones if id(weights) in wrapped]
        others = [weights for weights in whole_ones if id(weights) not in wrapped]
        self._writer.note(
            notes.Step,
            sums=_gradient_sums(ours),
            other_sums=_gradient_sums(others),
            weights=sums_of([*ours, *others]),
            rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            forwards=self._writer.forwards,
            wrapped_parameters=len(ours),
            sharded=sharded,
            sync_changed=self._sync_changed,
            seconds={**seconds, "whole": whole},
        )


def _gradient_sums(parameters: list[torch.Tensor]) -> list[tuple[float, float]]:
    """The sums over the gradients of parameters that have one."""
    gradients = [weights.grad for weights in parameters if weights.grad is not None]
    return sums_of(gradient for gradient in gradients if not gradient.is_sparse)


def _is_shard(weights: torch.Tensor) -> bool:
    """Whether a parameter is a shard of FSDP2 or FSDP, whose sum would need all ranks."""
    return hasattr(weights, "device_mesh") or hasattr(weights, "_local_shard")
