"""Note how a script trains on this rank: models, optimizers, what ranks send, where time goes.

The audit's witness makes a `TrainingObserver` on every rank, before the script. Needs torch.
"""

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
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

from ddp_tools.audit import notes
from ddp_tools.audit.digests import inputs_digest, rng_digest, sums_of
from ddp_tools.audit.loss_terms import divisor_of
from ddp_tools.audit.model_observer import ModelObserver
from ddp_tools.audit.notes import STEPS
from ddp_tools.audit.watch import replace_call

# What ranks call to talk to each other; the second, only two of them.
_PAIRS = "i?send|i?recv|batch_isend"
_ALL = "all_|broadcast|barrier|monitored|reduce(?!_op)|gather|scatter"
_COMMUNICATION = re.compile(f"{_ALL}|{_PAIRS}")
_POINT_TO_POINT = re.compile(_PAIRS)
_FORWARDS = 10 * STEPS  # calls of models before which random numbers are looked at
_FEW = 16  # numbers in a tensor that ranks reduce, as losses and counts
_MOST_NOT_FINITE = 5  # notes: all that follows is not finite either


class TrainingObserver(ModelObserver):
    """Observes models, optimizers and collectives besides."""

    def __init__(self, folder: Path, outermost: FrameType) -> None:
        super().__init__(folder, outermost)
        self._not_finite = 0
        self._in_communication = False  # which may call others
        self._in_backward = False
        self._stepping: Optimizer | None = None
        self._last_step = time.perf_counter()

    def start(self) -> None:
        """Note from now on, until the process ends."""
        super().start()
        self._hook_communication()
        self._hook_forward()
        self._hook_backward()
        self._hook_optimizers()

    def _timed(self, phase: str, function: Callable) -> Callable:
        """A function whose seconds count as those of a phase."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> object:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent[phase] += time.perf_counter() - begin

        return call

    # ---- models

    def _hook_forward(self) -> None:
        """Note what DDP's forward sends and is given, and whether it uses random numbers."""

        def observed(forward: Callable) -> Callable:
            def call(model: DDP, *args: Any, **options: Any) -> object:
                trains = torch.is_grad_enabled()
                averages = trains and model.require_backward_grad_sync
                has_buffers = any(True for _ in model.buffers())
                if averages or (model.broadcast_buffers and has_buffers):
                    name = "DDP's forward" if trains else "DDP's forward, to test,"
                    self.write(notes.Collective(**self.here(), name=name))
                self.forwards += 1
                if trains:
                    self.look_at_buffers(model)
                if trains and self.forwards <= STEPS:
                    digest = inputs_digest([*args, *options.values()])
                    self.write(notes.Inputs(**self.here(), digest=digest))
                state = rng_digest() if self.forwards <= _FORWARDS else ""
                output = forward(model, *args, **options)
                if state and trains and rng_digest() != state:
                    self.write(notes.RandomUse(**self.here(), state=state))
                if trains:
                    self._look_whether_finite("output", [output])
                return output

            return call

        replace_call(DDP, "forward", observed)
        # Of the wrapped model alone: DDP's own part may wait for other ranks.
        if hasattr(DDP, "_run_ddp_forward"):
            replace_call(DDP, "_run_ddp_forward", functools.partial(self._timed, "forward"))

    def _look_whether_finite(self, what: str, tensors: Iterable[object]) -> None:
        """Note an output, or a loss, that is not finite."""
        if self._not_finite >= _MOST_NOT_FINITE:
            return
        for value in tensors:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if not bool(torch.isfinite(value.detach()).all()):
                self._not_finite += 1
                self.write(notes.NotFinite(**self.here(), what=what, steps=self.steps))

    def _hook_backward(self) -> None:
        """Note a loss's divisor, and one not finite; a backward pass has the time that it waits."""

        def observed(backward: Callable) -> Callable:
            timed = self._timed("backward", backward)

            @functools.wraps(backward)
            def call(*args: Any, **options: Any) -> object:
                if self._in_backward:  # of checkpointed layers
                    return backward(*args, **options)
                tensors = args[0] if args else options.get("tensors")
                self._look_whether_finite("loss", [tensors])
                if self.steps < STEPS and (divisor := divisor_of(tensors)):
                    self.write(notes.Loss(**self.here(), divisor=divisor))
                self._in_backward = True
                try:
                    return timed(*args, **options)
                finally:
                    self._in_backward = False

            return call

        replace_call(torch.autograd, "backward", observed)

    # ---- optimizers

    def _hook_optimizers(self) -> None:
        """Note gradients and weights before each step of an optimizer."""

        def before_step(optimizer: Optimizer, *_: object) -> None:
            # ZeroRedundancyOptimizer steps one of its own, for its share of the weights.
            if self._stepping:
                return
            self._stepping = optimizer
            if not any(group.get("lr", 1) != 0 for group in optimizer.param_groups):
                return  # it moves nothing: DDP or a compiler is warmed up
            for loader_pass in self.open_passes:
                loader_pass.steps += 1
            self.steps += 1
            if self.steps in (1, 2, STEPS):
                self.copies.look(self.models)
            if self.steps <= STEPS:
                self._note_step(optimizer)
            self.end_if_asked()

        def after_step(optimizer: Optimizer, *_: object) -> None:
            if self._stepping is optimizer:
                self._stepping = None
                self.spent.clear()
                self._last_step = time.perf_counter()

        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)

    def _note_step(self, optimizer: Optimizer) -> None:
        """Note what an optimizer is about to use, and the seconds since the last step."""
        whole = time.perf_counter() - self._last_step
        seconds = {phase: self.spent[phase] for phase in ("loading", "forward")}
        seconds["own code"] = whole - sum(self.spent.values())
        wrapped = {id(weights) for model in self.models for weights in model.parameters()}
        stepped = [weights for group in optimizer.param_groups for weights in group["params"]]
        sharded = any(map(_is_shard, stepped))
        whole_ones = [] if sharded else stepped
        ours = [weights for weights in whole_ones if id(weights) in wrapped]
        others = [weights for weights in whole_ones if id(weights) not in wrapped]
        note = notes.Step(
            **self.here(),
            sums=_gradient_sums(ours),
            other_sums=_gradient_sums(others),
            weights=sums_of([*ours, *others]),
            rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            forwards=self.forwards,
            wrapped_parameters=len(ours),
            sharded=sharded,
            seconds={**seconds, "whole": whole},
        )
        self.write(note)

    # ---- collectives

    def _hook_communication(self) -> None:
        """Note each collective, and what is sent from rank to rank, in order."""

        def observed(name: str, communicate: Callable) -> Callable:
            timed = self._timed("communication", communicate)
            signature = inspect.signature(communicate)

            @functools.wraps(communicate)
            def call(*args: Any, **options: Any) -> object:
                if self._in_communication:
                    return communicate(*args, **options)
                given = signature.bind_partial(*args, **options).arguments
                self._note_communication(name, [*args, *options.values()], _own_part(given))
                self._in_communication = True
                try:
                    return timed(*args, **options)
                finally:
                    self._in_communication = False

            return call

        for name in filter(_COMMUNICATION.match, distributed_c10d.__all__):
            call = observed(name, getattr(distributed_c10d, name))
            setattr(dist, name, call)
            setattr(distributed_c10d, name, call)

    def _note_communication(self, name: str, arguments: list[object], part: object) -> None:
        """Note a call by which ranks talk to each other, with the size of its first tensor.

        part: what this rank gives.
        """
        groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        size = [*tensors[0].shape] if tensors else None
        others = [value for value in arguments if isinstance(value, dist.ReduceOp.RedOpType)]
        adds = "reduce" in name and {*others} <= {dist.ReduceOp.SUM, dist.ReduceOp.AVG}
        kind: type[notes.Communication] = notes.Collective
        if groups and groups[0] is not dist.group.WORLD:
            kind = notes.GroupCollective
        if _POINT_TO_POINT.match(name):
            kind = notes.PointToPoint
        note = kind(
            **self.here(),
            callers=self.callers(),
            name=name,
            size=size,
            **_content(part),
            adds=adds,
        )
        self.write(note)


def _own_part(given: Mapping[str, object]) -> object:
    """What a rank gives, of a collective's arguments by name: an object, or a tensor."""
    names = ("obj", "input_tensor", "input", "tensor")
    return next((given[name] for name in names if name in given), None)


def _content(part: object) -> dict[str, Any]:
    """The fields of a note that tell what a rank gives: numbers, integers or not, lengths."""
    if isinstance(part, torch.Tensor):
        few = part.numel() <= _FEW and not part.is_complex()
        numbers = part.detach().double().reshape(-1).tolist() if few else ()
        integers = not (part.is_floating_point() or part.is_complex())
        return {"numbers": numbers, "counts": integers, "lengths": [*part.shape[:1]]}
    parts = list(part.values()) if isinstance(part, dict) else part
    parts = parts if isinstance(parts, list | tuple) else [parts]
    numbers = [float(value) for value in parts[:_FEW] if isinstance(value, Real)]
    lengths = [_length(value) for value in [part, *parts[:_FEW]]]
    integers = all(isinstance(value, Integral) for value in parts)
    return {"numbers": numbers, "counts": integers, "lengths": lengths}


def _length(value: object) -> int:
    """The length of an object; -1 of one that has none."""
    try:
        return len(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _gradient_sums(parameters: list[torch.Tensor]) -> list[tuple[float, float]]:
    """The sums over the gradients of parameters that have one."""
    gradients = [weights.grad for weights in parameters if weights.grad is not None]
    return sums_of(gradient for gradient in gradients if not gradient.is_sparse)


def _is_shard(weights: torch.Tensor) -> bool:
    """Whether a parameter is the shard of one, FSDP2's or FSDP's: its sum would need all ranks."""
    return hasattr(weights, "device_mesh") or hasattr(weights, "_local_shard")
