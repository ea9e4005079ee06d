"""Count the memory of training: persistent state by kind, activations, and the peak.

`fits`, notebooks and lessons call it; each docstring names the ranks that may call the function.
Tensors may be fake ones, without memory (FakeTensorMode). Needs torch.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from itertools import product
from typing import Any, NamedTuple
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
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from ddp_tools.fake_models import movable


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or an unsharded tensor itself; any rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors on this rank; any rank.

    Shared memory counts once; of a sharded tensor, the rank's shard counts.
    """
    counter = MemoryCounter()
    memories = [local(tensor).untyped_storage() for tensor in tensors]  # all alive at one time
    for memory in memories:
        counter.add(memory)
    return counter.now


def held_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Count the bytes that persist from step to step, by kind.

    Any rank calls it, after a step and before zero_grad().
    """
    # ZeroRedundancyOptimizer keeps its shard in .optim.
    state = getattr(optimizer, "optim", optimizer).state
    slots = [slot for slots in state.values() for slot in slots.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "parameters": nbytes(model.parameters()),
        "gradients": nbytes(gradients),
        "optimizer state": nbytes(slot for slot in slots if isinstance(slot, Tensor)),
    }


class MemoryCounter:
    """Counts the bytes of storages, each once: the current sum and the peak."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def has(self, memory: UntypedStorage) -> bool:
        """Whether a storage is counted."""
        return memory._cdata in self._sizes

    def add(self, memory: UntypedStorage) -> None:
        """Count a storage, or update its size."""
        key, size = memory._cdata, memory.nbytes()
        self.now += size - self._sizes.get(key, 0)
        self.most = max(self.most, self.now)
        self._sizes[key] = size

    def remove(self, key: int) -> None:
        """Stop counting a storage, given its _cdata."""
        self.now -= self._sizes.pop(key, 0)


class LiveMemory(TorchDispatchMode, MemoryCounter):
    """While active, counts the memory of tensors that operations make, until it is freed."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        MemoryCounter.__init__(self)

    def __torch_dispatch__(
        self,
        func: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        """Call the operation and count its results."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls it again with the shards
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, memory: UntypedStorage) -> None:
        """Count a storage until it is freed."""
        if not self.has(memory):
            finalize(memory, self.remove, memory._cdata)
        self.add(memory)


def loss_of(output: object) -> Tensor:
    """Make a loss from a model's output: the output if it is one number, else a cross-entropy.

    The scores are in the last dimension. Any rank calls it. Raises TypeError if the output has no
    tensor.
    """
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is None:
        returned = f"{type(output).__name__}, with no tensor in it"
        raise TypeError(f"forward() returned {returned}: return a loss, or scores")
    if not first.dim():
        return first
    scores = first.flatten(0, -2) if first.dim() > 1 else first
    labels = torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, labels)


def _loss_words(output: object) -> str:
    """Describe the loss of `loss_of` in words; any rank."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is None or not first.dim():
        return "the number that forward() returned"
    shape = " x ".join(map(str, first.shape))
    return f"a cross-entropy over the last dimension of the output, {shape}"


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard a model with FSDP2, in place; all ranks call it.

    The elements of its outermost containers are gathered one by one.
    """
    policy = policy or MixedPrecisionPolicy()
    for unit in _units(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # PyTorch 2.14 warns about in-place operations on a model's output; there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return model


def checkpoint_units(model: nn.Module) -> nn.Module:
    """Use activation checkpointing on the elements of a model's outermost containers; any rank."""
    for unit in _units(model):
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
    return model


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost containers in a module."""
    # They have no forward(), and fully_shard refuses them.
    lists = nn.ModuleList | nn.ModuleDict
    for child in module.children():
        if isinstance(module, nn.Sequential | lists) and not isinstance(child, lists):
            yield child
        else:
            yield from _units(child)


# Functions that autocast computes in float32 on GPUs but not on CPUs; backward saves their results.
_IN_FLOAT32 = "softmax log_softmax softmin layer_norm group_norm exp pow sum cumsum softplus norm"


@contextmanager
def _rounded_as_on_gpus() -> Iterator[None]:
    """Under the CPU's autocast, give these functions float32, as the GPU's autocast does."""

    def in_float32(function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled("cpu"):
                args, kwargs = tree_map(_float32, (args, kwargs))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in product((torch, F, Tensor), _IN_FLOAT32.split()):
            if function := getattr(owner, name, None):
                stack.enter_context(patch.object(owner, name, in_float32(function)))
        yield


def _float32(value: Any) -> Any:
    """Convert a bfloat16 or float16 tensor to float32; return anything else unchanged."""
    few_bits = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if few_bits else value


@contextmanager
def _simulated_group(ranks: int) -> Iterator[DeviceMesh | None]:
    """Make this process rank 0 of a group that sends nothing; for one rank, make no group."""
    if ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


class StepMemory(NamedTuple):
    """The memory of a training step, in bytes, and the elements of each trained parameter.

    kinds: as from `held_bytes`, and "activations", which forward saves for backward; backward: the
    peak in forward and backward; step: the peak in the optimizer's step.
    """

    kinds: dict[str, float]
    backward: float
    step: float
    parameter_sizes: list[int]  # the largest first
    buffers: float = 0.0  # in the peaks, but in none of the kinds
    loss: str = ""  # the loss, in words


def measure_step(
    mode: Callable[[], AbstractContextManager],
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bf16: bool,
    recompute: bool,
    ranks: int = 1,
    keep_gradients: bool = False,
) -> StepMemory:
    """Take a training step, with the optimizer's state already made, and count its bytes.

    No rank of a process group can call it.

    Args:
        mode: FakeTensorMode for fake tensors, nullcontext for real ones.
        make, make_optimizer: return the model, and the optimizer for its parameters.
        shape, dtype: of the input, a batch.
        bf16: use autocast, or FSDP2's MixedPrecisionPolicy.
        recompute: use activation checkpointing on the elements of the outermost containers.
        ranks: of FSDP2, if more than 1.
        keep_gradients: gradients keep their memory from step to step, as in DDP's buckets.
    """
    resize = UntypedStorage.resize_

    def counted(memory: UntypedStorage, size: int) -> None:  # FSDP2 frees and allocates by it
        resize(memory, size)
        live.count(memory)

    counts_resizing = patch.object(UntypedStorage, "resize_", counted)
    alike = _rounded_as_on_gpus()
    with _simulated_group(ranks) as mesh, counts_resizing, alike, mode(), LiveMemory() as live:
        with movable():
            model = make().train()
        for tensor in (*model.parameters(), *model.buffers()):
            live.count(tensor.untyped_storage())  # even if made earlier, as a file's constant
        if recompute:
            checkpoint_units(model)
        inputs = torch.zeros(shape, dtype=dtype)
        if mesh:
            dtype_of_weights = torch.bfloat16 if bf16 else None
            shard(model, mesh, MixedPrecisionPolicy(param_dtype=dtype_of_weights))
        trained = [p for p in model.parameters() if p.requires_grad]
        # The optimizer gets plain shards: with DTensors it would take far longer.
        shards = [nn.Parameter(local(p.detach())) for p in trained]
        optimizer = make_optimizer(shards)
        kinds = _take_first_step(model, optimizer, shards)
        for p, part in zip(trained, shards, strict=True):
            p.grad, part.grad = part.grad if keep_gradients else None, None
        live.most = before = live.now
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16 and not mesh):
            output = model(inputs)
            loss, words = loss_of(output), _loss_words(output)
            del output  # a training step does not keep it
        kinds["activations"] = live.now - before
        loss.backward()
        backward, live.most = live.most, live.now
        for p, part in zip(trained, shards, strict=True):
            part.grad = None if p.grad is None else local(p.grad)
        optimizer.step()
        sizes = sorted((p.numel() for p in trained), reverse=True)
        buffers = float(nbytes(model.buffers()))
        return StepMemory(kinds, backward, live.most, sizes, buffers, words)


def _take_first_step(
    model: nn.Module,
    optimizer: Optimizer,
    shards: list[nn.Parameter],
) -> dict[str, float]:
    """Step on zero gradients, to make the optimizer's state; return the bytes that persist."""
    for part in shards:
        part.grad = torch.zeros_like(part)
    optimizer.step()
    gradients = [part.grad for part in shards if part.grad is not None]
    return {**held_bytes(model, optimizer), "gradients": nbytes(gradients)}
