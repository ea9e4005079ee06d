"""Allow a model on fake tensors to be moved, converted and copied while it is made.

Fake tensors (FakeTensorMode) have a shape and no memory. `memory` and `model_file` use it, in a
process that is not a rank. Needs torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def movable() -> Iterator[None]:
    """Let models use .to(…), .half() and copy.deepcopy on fake tensors.

    torch itself can neither swap nor copy them.
    """
    # By the id of a parameter, during the outermost call: a shared parameter stays shared. The old
    # one is kept alive, so that no other gets its id.
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    calls: list[nn.Module] = []

    def apply(module: nn.Module, convert: Callable, recurse: bool = True) -> nn.Module:
        calls.append(module)
        for child in module.children() if recurse else ():
            child._apply(convert)
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in converted:
                new = nn.Parameter(convert(old.detach()), old.requires_grad)
                converted[id(old)] = converted[id(new)] = (new, old)
            module._parameters[name] = converted[id(old)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        calls.pop()
        if not calls:
            converted.clear()
        return module

    def copied(old: Tensor, copies: dict[int, Any]) -> Tensor:  # as in nn.TransformerEncoder
        if id(old) not in copies:
            new = old.detach().clone()
            is_weight = isinstance(old, nn.Parameter)
            copies[id(old)] = nn.Parameter(new, old.requires_grad) if is_weight else new
        return copies[id(old)]

    copies = patch.object(FakeTensor, "__deepcopy__", copied, create=True)
    with copies, patch.object(nn.Module, "_apply", apply):
        yield
