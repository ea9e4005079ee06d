"""Load a model of one's own from a file, and read the shape of its input off its first layer.

`fits` and its command call it in the learner's process, before any process group. Needs torch.
"""

import importlib.util
import io
import logging
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import DataLoader

from ddp_tools import PlainError
from ddp_tools.fake_models import movable

# How torch says that it cannot do something on tensors without memory.
_NEED_MEMORY = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_NEED_MEMORY_MESSAGES = (
    "convert all Tensors to FakeTensors",
    "data pointer of Tensor",
    "numpy() is not supported for tensor subclass",
)

# What neither tensors without memory nor real steps can count, and what to give instead.
_CURES = {
    "UninitializedParameter": "a lazy layer has no size before its first call: give its sizes",
    "uninitialized": "a lazy layer has no size before its first call: give its sizes",
    "can only be applied to a module once": "make the model anew in each call",
    "SparseTensorImpl": "sparse gradients cannot be counted: take Embedding(sparse=False)",
}

# What a script does at its start, and a model's file that is imported does not.
_STARTS: tuple[tuple[object, str], ...] = (
    (ArgumentParser, "parse_args"),
    (torch.distributed, "init_process_group"),
    (BaseProcess, "start"),
    (DataLoader, "__iter__"),
    (torch.autograd, "backward"),
)
_GUARD = 'put the start under `if __name__ == "__main__":`'

# An error is told by `error_line`, in a line.
logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)


def load(model: str) -> Callable[[], nn.Module]:
    """Get what makes the model, of FILE.py:NAME: a class or a function that needs no argument.

    Raises PlainError.
    """
    file, _, name = model.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        expected = "with a file that is there and a class or a function in it"
        raise PlainError(f"{model!r} is not FILE.py:NAME, {expected}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not spec or not spec.loader:
        raise PlainError(f"{path.name} cannot be imported: Python has no loader for it")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script
    sys.dont_write_bytecode = True  # no __pycache__ beside somebody's files
    try:
        with _no_start(), redirect_stderr(io.StringIO()):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        cure = "" if isinstance(error, ImportError | SyntaxError) else f"; {_GUARD}, if it is that"
        if isinstance(error, SystemExit):
            cure = f" (a script starts at its import): {_GUARD}"
        raise PlainError(f"{path.name} cannot be imported: {error_line(error)}{cure}") from error
    make = vars(module).get(name)
    if not callable(make):
        raise PlainError(f"{path.name} has no class and no function {name!r}")

    def made(*args: object, **kwargs: object) -> nn.Module:
        with _no_start():
            model = make(*args, **kwargs)
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name}() returned {type(model).__name__}, and no nn.Module")
        return model

    return made


@contextmanager
def _no_start() -> Iterator[None]:
    """Stop at what starts a training, by SystemExit: no `except Exception` of a script takes it."""
    with ExitStack() as stack:
        for owner, name in _STARTS:
            stop = SystemExit(f"{name}() is called")
            stack.enter_context(patch.object(owner, name, side_effect=stop))
        yield


def sample_of(
    make: Callable[[], nn.Module],
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[int, ...], torch.dtype, str]:
    """Complete the shape and type of one sample of the model that `make` returns.

    They are read off its first layer with weights. Returns both, and a line that says what was
    read, or "". Raises PlainError where the layer does not tell.
    """
    if shape and dtype:
        return tuple(shape), dtype, ""
    layer = _first_layer(make)
    dtype = dtype or _dtype_of(layer)
    if shape:
        return tuple(shape), dtype, ""
    if not isinstance(layer, nn.Linear):
        example, reason = _unread_shape(layer)
        raise PlainError(f"give the shape of one sample, as in --input {example}: {reason}")
    kind, numbers = type(layer).__name__, layer.in_features
    first = f"{kind}, the first layer with weights, takes {numbers} numbers"
    line = f"{first}: so many are taken for a sample. --input gives another shape."
    return (numbers,), dtype, line


def _dtype_of(layer: nn.Module | None) -> torch.dtype:
    """The type of what a first layer takes: that of its weights, or of tokens."""
    if isinstance(layer, nn.Embedding):
        return torch.int64
    return next(layer.parameters()).dtype if layer else torch.float32


def _unread_shape(layer: nn.Module | None) -> tuple[str, str]:
    """Give an example of the shape that a first layer takes, and what is known of it."""
    first = f"the first layer with weights, {type(layer).__name__},"
    if isinstance(layer, _ConvNd):
        sides, channels = len(layer.kernel_size), layer.in_channels
        plural = "s" if channels > 1 else ""
        return f"{channels}{sides * ' 32'}", f"{first} takes {channels} channel{plural} of any size"
    if isinstance(layer, nn.Embedding):
        return "128", f"{first} takes any number of tokens"
    if isinstance(layer, nn.RNNBase):
        numbers = layer.input_size
        return f"100 {numbers}", f"{first} takes {numbers} numbers at each of any number of steps"
    return "1 28 28", f"{first} does not tell it" if layer else "no layer has weights"


def _first_layer(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Get the first layer with weights of its own in the model; raises PlainError."""
    start_autograd()
    try:
        try:
            with FakeTensorMode(), movable():
                layers = list(make().modules())
        except (AssertionError, RuntimeError) as error:
            if not needs_memory(error):
                raise
            layers = list(make().modules())
    except (Exception, SystemExit) as error:
        line = f"the model cannot be made: {error_line(error)}{advice(error)}"
        raise PlainError(line) from error
    with_weights = (layer for layer in layers if list(layer.parameters(recurse=False)))
    return next(with_weights, None)


def start_autograd() -> None:
    """Take a first backward; call it before tensors without memory are made.

    After them, the first one starts threads, and no rank can be forked any more.
    """
    torch.ones((), requires_grad=True).backward()


def needs_memory(error: BaseException) -> bool:
    """Whether torch cannot do it on tensors without memory, so that real ones are needed."""
    if isinstance(error, _NEED_MEMORY):
        return True
    return any(message in str(error) for message in _NEED_MEMORY_MESSAGES)


def advice(error: BaseException) -> str:
    """What to do about an error of the model's, behind its line; "" where nobody knows."""
    cures = [cure for message, cure in _CURES.items() if message in str(error)]
    if cures:
        return f": {cures[0]}"
    if isinstance(error, TypeError | IndexError | KeyError):
        return "; fits calls NAME() and gives forward() one tensor: write a small class around it"
    return ""


def error_line(error: BaseException) -> str:
    """Tell an error in one line, with the last line of code that is no library's and not ours."""
    modules = (torch.__file__, __file__, io.__file__)
    libraries = ("<", *(str(Path(module).parent) for module in modules))
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(libraries)]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    first_line = next(iter(str(error).splitlines()), "").rstrip(":")
    return f"{at}{type(error).__name__}: {first_line}"
