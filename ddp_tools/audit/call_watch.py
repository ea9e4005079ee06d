"""Note this rank's calls of init_process_group and of collectives and point-to-point functions.

Each rank has one `CallWatch`. Needs torch.
"""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_tools.audit import notes
from ddp_tools.audit.digests import sums_of
from ddp_tools.audit.watch import replace_call
from ddp_tools.audit.writer import NoteWriter

# The functions by which ranks communicate; those of the second are point-to-point.
_PAIRS = "i?send|i?recv|batch_isend"
_ALL = "all_|broadcast|barrier|monitored|reduce(?!_op)|gather|scatter"
_COMMUNICATION = re.compile(f"{_ALL}|{_PAIRS}")
_POINT_TO_POINT = re.compile(_PAIRS)
_FEW = 16  # numbers at most in a reduced tensor of losses or counts


class CallWatch:
    """Notes calls of init_process_group and each call by which ranks communicate."""

    def __init__(self, writer: NoteWriter) -> None:
        """Set the hooks."""
        self._writer = writer
        self._in_communication = False  # which may call others
        replace_call(dist, "init_process_group", self._observed_join)
        replace_call(distributed_c10d, "init_process_group", lambda _: dist.init_process_group)
        self._hook_communication()

    def _observed_join(self, join: Callable) -> Callable:
        """Make init_process_group note its arguments, and end a rank if they are wrong."""
        signature = inspect.signature(join)
        launched = int(self._writer.rank), int(os.environ["WORLD_SIZE"])

        @functools.wraps(join)
        def call(*args: Any, **options: Any) -> None:
            given = signature.bind(*args, **options).arguments
            rank = _given_number(given.get("rank"), "RANK", launched[0])
            world_size = _given_number(given.get("world_size"), "WORLD_SIZE", launched[1])
            self._writer.note(notes.Join, rank=rank, world_size=world_size)
            if (rank, world_size) != launched:  # it would wait until the limit
                sys.exit("init_process_group has a wrong rank or world size")
            join(*args, **options)

        return call

    def _hook_communication(self) -> None:
        """Note each collective and each point-to-point call, in order."""

        def observed(name: str, communicate: Callable) -> Callable:
            timed = self._writer.timed("communication", communicate)
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

    def _note_communication(self, name: str, arguments: list[object], part: Any) -> None:
        """Note a call by which ranks communicate, with the size of its first tensor.

        part: this rank's input.
        """
        groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        size = [*tensors[0].shape] if tensors else None
        others = [value for value in arguments if isinstance(value, dist.ReduceOp.RedOpType)]
        adds = "reduce" in name and {*others} <= {dist.ReduceOp.SUM, dist.ReduceOp.AVG}
        sums = adds and {*others} <= {dist.ReduceOp.SUM} and self._writer.steps < notes.STEPS
        sums = sums and isinstance(part, torch.Tensor) and part.is_floating_point()
        kind: type[notes.Communication] = notes.Collective
        if groups and groups[0] is not dist.group.WORLD:
            kind = notes.GroupCollective
        if _POINT_TO_POINT.match(name):
            kind = notes.PointToPoint
        self._writer.note(
            kind,
            callers=self._writer.callers(),
            name=name,
            size=size,
            **_content(part),
            adds=adds,
            added=sums_of([part]) if sums else (),
        )


def _own_part(given: Mapping[str, object]) -> object:
    """This rank's input among a collective's arguments by name: an object or a tensor."""
    names = ("obj", "input_tensor", "input", "tensor")
    return next((given[name] for name in names if name in given), None)


def _content(part: object) -> dict[str, Any]:
    """The fields of a note on this rank's input: numbers, whether they are integers, lengths."""
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
    """The length of an object; -1 if it has none."""
    try:
        return len(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _given_number(value: object, variable: str, launched: int) -> int:
    """The number that init_process_group uses: its argument, or the environment variable.

    launched: the launcher's number, if the script has removed the variable.
    """
    if isinstance(value, int) and value >= 0:
        return value
    return int(os.environ.get(variable, launched))
