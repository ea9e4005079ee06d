"""Run code as one rank of a group that takes CUDA tensors only, on a machine without a GPU.

Tensors have a device and no memory (FakeTensorMode), and no collective moves anything (torch's own "fake" backend,
registered for CUDA alone). A CPU tensor in a collective is refused as by an NCCL group, in the same words; so is
arithmetic over two devices. What needs numbers, or a driver, is replaced below, each with its reason.
"""

import ast
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from ddp_tools.movable import movable


class Wrapped(nn.Module):
    """In DDP's place, whose constructor reads memory: sends what DDP sends, and keeps no_sync and the hooks."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None, **_: object) -> None:
        super().__init__()
        self.module, self.group = module, process_group
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():  # which "fake" lets pass
                raise RuntimeError("Attempt to perform collective on tensor not on device passed to init_process_group")
            dist.broadcast(tensor.detach(), 0, process_group)
        self.no_sync = nullcontext
        self.register_comm_hook = lambda *_: None

    def forward(self, *inputs: Tensor) -> Tensor:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0, self.group)
        return self.module(*inputs)


class DevicesOfTheGroup(TorchDispatchMode):
    """Refuse tensors of another device than the group's: for a tensor without memory c10d does not look."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            leaves = tree_leaves((args, kwargs))
            objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
            [group] = [each for each in objects if each._type().name() == "ProcessGroup"]
            known = [device.type for device in dist.ProcessGroup.unbox(group)._device_types]
            for tensor in leaves:
                if isinstance(tensor, Tensor) and tensor.device.type not in known:
                    raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        return function(*args, **(kwargs or {}))


class AtHome(DataLoader):
    """In the place of DataLoader: without workers, which would have no group."""

    def __init__(self, *things: object, **options: object) -> None:
        none = ("num_workers", "multiprocessing_context", "persistent_workers", "worker_init_fn", "pin_memory")
        super().__init__(*things, **{name: value for name, value in options.items() if name not in none})


make_group = dist.new_group


def beside(ranks: list[int] | None = None, backend: str | None = None, **_: object) -> dist.ProcessGroup:
    """In the place of new_group: gloo, which would wait for other ranks, becomes a group of CPU tensors only."""
    return make_group(ranks, backend="cpu:fake" if backend == "gloo" else None)


def everyone(objects: list, mine: object, group: object = None) -> None:
    """In the place of all_gather_object, which moves bytes to the GPU by itself: all ranks said the same."""
    objects[:] = [mine] * len(objects)


@contextmanager
def one_rank(rank: int, size: int) -> Iterator[None]:
    """Be this rank of so many, each with a GPU. Of no tensor the numbers are known: all are read as one."""
    dist.init_process_group("cuda:fake", rank=rank, world_size=size, store=FakeStore())
    cuda = {
        "_lazy_init": lambda: None,
        "current_device": lambda: rank,
        "get_device_capability": lambda *_: (9, 0),
        "Event": MagicMock,
        "synchronize": lambda *_: None,
    }
    read = {"backward": backward, "item": number, "tolist": lambda tensor: nested(number(tensor), tensor.shape)}
    read |= {"__bool__": lambda _: True, "__float__": lambda _: 1.0} | dict.fromkeys(
        ("__int__", "__index__"), lambda _: 1
    )
    read["__format__"] = lambda tensor, form: format(number(tensor), form) if tensor.dim() == 0 else repr(tensor)
    group = {
        "get_backend": lambda *_: "nccl",
        "barrier": lambda *_, **__: None,  # it asks for an accelerator, and would take the CPU here
        "new_group": beside,
        "all_gather_object": everyone,
    }
    torchs = {  # by name, since whoever imports them inside gets these
        "torch.autograd.grad": gradients,
        "torch.equal": lambda one, other: one.shape == other.shape,
        "torch.nn.parallel.DistributedDataParallel": Wrapped,
        "torch.utils.data.DataLoader": AtHome,
    }
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.multiple(dist, **group))
        for name, value in torchs.items():
            stack.enter_context(patch(name, value))
        for name, value in read.items():
            stack.enter_context(patch.object(Tensor, name, value))
        stack.enter_context(movable())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(DevicesOfTheGroup())
        yield


def backward(loss: Tensor, *_: object, **__: object) -> None:
    """In the place of autograd's, which asks CUDA for a stream: give each weight behind the loss a gradient."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        if (weight := getattr(node, "variable", None)) is not None:
            weight.grad = torch.zeros_like(weight)


def gradients(_: Tensor, inputs: Tensor | list[Tensor], **__: object) -> list[Tensor]:
    """In the place of torch.autograd.grad, for the same reason."""
    return [torch.zeros_like(weight) for weight in ([inputs] if isinstance(inputs, Tensor) else inputs)]


def number(tensor: Tensor) -> float | int | bool:
    """The number one, of the tensor's type."""
    return 1.0 if tensor.is_floating_point() else tensor.dtype is torch.bool or 1


def nested(value: object, shape: tuple[int, ...]) -> object:
    """The value in lists of this shape."""
    return [nested(value, shape[1:]) for _ in range(shape[0])] if shape else value


class Unjudged(ast.NodeTransformer):
    """Have what an assert asks for evaluated, and not judged: the numbers are not known."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)


def run(cell: str, variables: dict) -> None:
    """Run a cell as a rank would."""
    exec(compile(ast.fix_missing_locations(Unjudged().visit(ast.parse(cell))), "cell", "exec"), variables)
