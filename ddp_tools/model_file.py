"""Load your model from a file, and read the shape of its input from its first layer.

`fits` and its command call it in the driver process, before any process group. Needs torch.
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

# torch's errors for operations that fake tensors do not support.
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

# Errors that occur on fake and on real tensors, and their fixes.
_CURES = {
    "UninitializedParameter": "a lazy layer has no size before its first call: give its sizes",
    "uninitialized": "a lazy layer has no size before its first call: give its sizes",
    "can only be applied to a module once": "make a new model in each call",
    "SparseTensorImpl": "sparse gradients cannot be counted: use Embedding(sparse=False)",
}

# Calls at the start of a training script, which importing a model's file should not make.
_STARTS: tuple[tuple[object, str], ...] = (
    (ArgumentParser, "parse_args"),
    (torch.distributed, "init_process_group"),
    (BaseProcess, "start"),
    (DataLoader, "__iter__"),
    (torch.autograd, "backward"),
)
_GUARD = 'put the start under `if __name__ == "__main__":`'

# `error_line` reports an error, in one line.
logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)


def load(model: str) -> Callable[[], nn.Module]:
    """Import FILE.py:NAME, a class or a function without required arguments that makes the model.

    Raises PlainError.
    """
    file, _, name = model.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        expected = "with an existing file and a class or a function in it"
        raise PlainError(f"{model!r} is not FILE.py:NAME, {expected}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not spec or not spec.loader:
        raise PlainError(f"{path.name} cannot be imported: Python has no loader for it")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script
    sys.dont_write_bytecode = True  # no __pycache__ next to the user's files
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
            raise TypeError(f"{name}() returned {type(model).__name__}, not an nn.Module")
        return model

    return made


@contextmanager
def _no_start() -> Iterator[None]:
    """Raise SystemExit at calls that start a training; `except Exception` does not catch it."""
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
    """Complete the shape and dtype of one sample, from the first layer with weights.

    make returns the model. Returns both, and a line on the shape that was read, or "". Raises
    PlainError if the layer does not determine the shape.
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
    line = f"{first}, which is used as the shape of a sample. --input sets a different shape."
    return (numbers,), dtype, line


def _dtype_of(layer: nn.Module | None) -> torch.dtype:
    """The dtype of a first layer's input: its weights' dtype, or int64 for tokens."""
    if isinstance(layer, nn.Embedding):
        return torch.int64
    return next(layer.parameters()).dtype if layer else torch.float32


def _unread_shape(layer: nn.Module | None) -> tuple[str, str]:
    """An example of the shape of a first layer's input, and a text on its known dimensions."""
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
    return "1 28 28", f"{first} does not determine it" if layer else "no layer has weights"


def _first_layer(make: Callable[[], nn.Module]) -> nn.Module | None:
    """The first layer of the model with its own weights, or None. Raises PlainError."""
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
    """Run a first backward pass; call it before fake tensors are made.

    After them, the first backward starts threads, and then no rank can be forked.
    """
    torch.ones((), requires_grad=True).backward()


def needs_memory(error: BaseException) -> bool:
    """Whether torch cannot do it on fake tensors, so that real ones are needed."""
    if isinstance(error, _NEED_MEMORY):
        return True
    return any(message in str(error) for message in _NEED_MEMORY_MESSAGES)


def advice(error: BaseException) -> str:
    """The fix for an error of the model, to follow its line; "" if unknown."""
    cures = [cure for message, cure in _CURES.items() if message in str(error)]
    if cures:
        return f": {cures[0]}"
    if isinstance(error, TypeError | IndexError | KeyError):
        return "; fits calls NAME() and gives forward() one tensor: write a small class around it"
    return ""


def error_line(error: BaseException) -> str:
    """Format an error in one line, with the innermost FILE:LINE of the user's code."""
    modules = (torch.__file__, __file__, io.__file__)
    libraries = ("<", *(str(Path(module).parent) for module in modules))
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(libraries)]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    first_line = next(iter(str(error).splitlines()), "").rstrip(":")
    return f"{at}{type(error).__name__}: {first_line}"
