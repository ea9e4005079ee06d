"""Find copies of the wrapped models on this rank, such as an average of their weights (EMA).

Each rank has one `Copies`. Needs torch.
"""

import sys
import weakref
from collections.abc import Callable
from types import FrameType

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ddp_tools.audit.notes import Copy
from ddp_tools.audit.watch import hear


class Copies:
    """The models with the names and shapes of a wrapped one: for each line the last that it made.

    They are kept alive to the end, since the function that made them may return earlier.
    """

    def __init__(
        self, line_of: Callable[[FrameType], str], note_tensors: Callable[..., None]
    ) -> None:
        """Hook the creation of modules."""
        self._line_of = line_of
        self._note_tensors = note_tensors
        self._made: list[tuple[weakref.ref[nn.Module], str]] = []  # not checked yet
        self._copies: dict[str, nn.Module] = {}  # by the line that made it
        for name in ("__init__", "__setstate__"):
            hear(nn.Module, name, after=self._heard)

    def _heard(self, module: nn.Module, *_: object, **__: object) -> None:
        """Keep a module that was made by its class or as a copy."""
        self._made.append((weakref.ref(module), self._line_of(sys._getframe(1))))

    def look(self, models: list[nn.parallel.DistributedDataParallel]) -> None:
        """Look for copies among the modules that were made since the last look."""
        wrapped = {_shapes(model.module) for model in models}
        ours = {id(weights) for model in models for weights in model.parameters()}
        made, self._made = self._made, []
        inside: set[int] = set()
        for reference, line in made:
            module = reference()
            if module is None or id(module) in inside or _shapes(module) not in wrapped:
                continue
            if not any(id(weights) in ours for weights in module.parameters()):
                inside |= {id(part) for part in module.modules()}
                self._copies[line] = module
                self._note(line, "begin")

    def note_end(self) -> None:
        """Note the tensors of all copies at the end."""
        for line in self._copies:
            self._note(line, "end")

    def _note(self, line: str, when: str) -> None:
        module = self._copies[line]
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        tensors = {name: tensors[name] for name in tensors if name not in statistics_of(module)}
        number, name = [*self._copies].index(line), type(module).__name__
        self._note_tensors(Copy, when, number, tensors, class_name=name, made=line)


def statistics_of(model: nn.Module) -> set[str]:
    """The names of the buffers of BatchNorm and similar layers."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, layer in model.named_modules()
        if isinstance(layer, _NormBase) or "BatchNorm" in type(layer).__name__
        for name, _ in layer.named_buffers(recurse=False)
    }


def _shapes(model: nn.Module) -> tuple:
    """The names and shapes of the weights; of a wrapper, such as AveragedModel, its module's."""
    weights = [*model.named_parameters()]
    if any(is_lazy(tensor) for _, tensor in weights):
        return ()
    return tuple((name.removeprefix("module."), tensor.shape) for name, tensor in weights)
