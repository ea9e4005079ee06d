"""Let a model be moved, converted and copied while it is made on tensors without memory.

`memory` and `model_file` use it, in a process that is no rank. Needs torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def movable() -> Iterator[None]:
    """Let models say .to(…), .half() and copy.deepcopy also on tensors without memory.

    torch itself can neither swap nor copy these.
    """
    # By the id of a parameter, while the outermost call lasts: one that is shared stays one. The
    # old one is kept, so that no other gets its id.
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
