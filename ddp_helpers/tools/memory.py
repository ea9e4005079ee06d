"""Count the memory of a training step: what stays, by kind, and the most at a time; of tensors without memory, too."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import finalize

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def local(tensor: Tensor) -> Tensor:
    """Get this rank's shard of a sharded tensor, or else the tensor; any rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors on this rank: shared memory counts once, a sharded tensor with its shard; any rank."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def held(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of what stays from step to step, by kind; any rank, after a step and before zero_grad()."""
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer keeps its share in .optim
    return {
        "parameters": nbytes(model.parameters()),
        "gradients": nbytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer state": nbytes(t for slots in state.values() for t in slots.values() if isinstance(t, Tensor)),
    }


class Live(TorchDispatchMode):
    """While active, counts the memory that operations have given to tensors and that is still there, and its most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0  # bytes

    def __torch_dispatch__(self, operation: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        """Call the operation, and count what it made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the shards
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, memory: UntypedStorage) -> None:
        """Count it, once, until it is freed."""
        key, size = memory._cdata, memory.nbytes()
        if key not in self.sizes:
            finalize(memory, self.freed, key)
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key], self.most = size, max(self.most, self.now)

    def freed(self, key: int) -> None:
        """Count it no more."""
        self.now -= self.sizes.pop(key)


def loss_of(output: object) -> Tensor:
    """What a model returns as a loss: itself if it is one number, else the cross-entropy over the last dimension."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise TypeError(f"forward() returned {type(output).__name__}, with no tensor in it: return a loss, or scores")
    scores = first.flatten(0, -2) if first.dim() > 1 else first
    labels = torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, labels) if first.dim() else first


def shard(model: nn.Module, **options) -> nn.Module:
    """Make it FSDP2's: the elements of the outermost containers are gathered one by one; all ranks."""
    lists = nn.ModuleList | nn.ModuleDict  # they have no forward(), and fully_shard refuses them

    def units(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            element = isinstance(module, nn.Sequential | lists) and not isinstance(child, lists)
            yield from [child] if element else units(child)

    for unit in units(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


@contextmanager
def pretended(ranks: int) -> Iterator[DeviceMesh | None]:
    """Be rank 0 of a group in which nothing is sent; alone, of none."""
    if ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@contextmanager
def movable() -> Iterator[None]:
    """Inside, a model may say .to(…), .half() and the like also on tensors without memory, which torch cannot swap."""
    made, calls = {}, []  # by parameter, while the outermost call lasts: one that is shared stays one

    def apply(module: nn.Module, convert: Callable, recurse: bool = True) -> nn.Module:
        calls.append(module)
        for child in module.children() if recurse else ():
            child._apply(convert)
        for name, old in module._parameters.items():
            if old is not None and id(old) not in made:
                new = nn.Parameter(convert(old.detach()), old.requires_grad)
                made[id(old)], made[id(new)] = (new, old), (new, old)
            module._parameters[name] = old if old is None else made[id(old)][0]
        module._buffers |= {name: convert(old) for name, old in module._buffers.items() if old is not None}
        calls.pop()
        if not calls:
            made.clear()
        return module

    with patch.object(nn.Module, "_apply", apply):
        yield


def step(mode: Callable, make: Callable, rule: Callable, batch: tuple, bf16: bool, ranks: int = 1, stay: bool = False):
    """Take a step, with the optimizer's state there already, and count bytes: each kind, and the most at a time.

    mode: FakeTensorMode for tensors without memory, nullcontext for real ones. make, rule: make the model, and the
    optimizer of a list of parameters. batch: shape and dtype of the input. ranks: of FSDP2, if more than 1.
    stay: the gradients keep their memory, as in DDP's buckets. No rank of a process group can call it.
    Returns what held() does, "activations", what forward leaves for backward; "sizes", the number of elements of each
    trained parameter; "backward", the most at a time in forward and backward, and "step", in the optimizer's step.
    """
    resize = UntypedStorage.resize_

    def counted(memory: UntypedStorage, size: int) -> None:  # FSDP2 frees and takes memory so
        resize(memory, size)
        live.count(memory)

    with pretended(ranks) as mesh, patch.object(UntypedStorage, "resize_", counted), mode(), Live() as live:
        with movable():
            model = make().train()
        inputs = torch.zeros(batch[0], dtype=batch[1])
        if mesh:
            shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None))
        trained = [p for p in model.parameters() if p.requires_grad]
        own = [(p, nn.Parameter(local(p.detach()))) for p in trained]  # DTensors would take far longer
        optimizer = rule([part for _, part in own])
        for _, part in own:
            part.grad = torch.zeros_like(part)
        optimizer.step()
        found = held(model, optimizer) | {"gradients": nbytes(part.grad for _, part in own)}
        found["sizes"] = sorted((p.numel() for p in trained), reverse=True)
        for p, part in own:
            p.grad, part.grad = part.grad if stay else None, None
        live.most = before = live.now
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16 and not mesh):
            loss = loss_of(model(inputs))
        found["activations"] = live.now - before
        loss.backward()
        found["backward"], live.most = live.most, live.now
        for p, part in own:
            part.grad = None if p.grad is None else local(p.grad)
        optimizer.step()
        return found | {"step": live.most}
