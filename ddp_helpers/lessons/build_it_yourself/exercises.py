"""The exercises of notebook 16: what is built, by the names of the stubs, and who judges it.

`lessons.check` reads EXERCISES, in the learner's process. The judges run an answer on two and on
three ranks, which are forked from it. The functions below say what is given and asked; the answers
are in `notebooks/solutions`.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_helpers.lessons.build_it_yourself import (
    functions,
    pipeline,
    replicas,
    ring,
    sharded_layer,
    sharded_optimizer,
)
from ddp_helpers.lessons.exercise import Project


def ring_sum(tensor: Tensor) -> None:
    """Leave in a flat tensor its sum over all ranks, by sends to the next rank."""
    raise NotImplementedError


def ddp_by_hand(model: nn.Module) -> Callable[[], None]:
    """Give all ranks rank 0's model; return the function that averages its gradients."""
    raise NotImplementedError


def overlap(model: nn.Module, bucket_size: int) -> Callable[[], None]:
    """Let buckets of gradients leave during backward; return the function that ends it."""
    raise NotImplementedError


def zero_1(
    parameters: list[nn.Parameter],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
) -> Callable[[], None]:
    """Return a function that takes a step in which each rank holds its own part of the state."""
    raise NotImplementedError


def shard_layer(layer: nn.Linear) -> nn.Parameter:
    """Cut a layer's weight over the ranks; return this rank's part, which is trained."""
    raise NotImplementedError


def sync_batch_norm(x: Tensor, eps: float) -> Tensor:
    """Normalise the columns of x by mean and variance over the rows of all ranks."""
    raise NotImplementedError


def parallel_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute tanh(x @ up.T) @ down.T, of which each rank has rows of up and columns of down."""
    raise NotImplementedError


def pipeline_step(
    stage: nn.Module,
    inputs: list[Tensor],
    labels: list[Tensor],
    one_by_one: bool,
) -> None:
    """Take all micro-batches through the stages and back; each rank has a stage."""
    raise NotImplementedError


EXERCISES = [
    Project(ring_sum, [], {}, ring.JUDGE),
    Project(ddp_by_hand, [], {}, replicas.DDP_JUDGE),
    Project(overlap, [], {}, replicas.BUCKETS_JUDGE),
    Project(zero_1, [], {}, sharded_optimizer.JUDGE),
    Project(shard_layer, [], {}, sharded_layer.JUDGE),
    Project(sync_batch_norm, [], {}, functions.NORM_JUDGE),
    Project(parallel_mlp, [], {}, functions.PARALLEL_JUDGE),
    Project(pipeline_step, [], {}, pipeline.JUDGE),
]
