"""Compare what the ranks hold: the weights and gradients of a model, as one vector each.

Notebook 05 uses it in its `%%ranks` cells, on every rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector


def same(tensor: Tensor) -> bool:
    """Return, on every rank, whether all ranks hold the same bits; every rank calls it."""
    replicas = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, tensor.detach().contiguous())
    return all(torch.equal(replica, replicas[0]) for replica in replicas)


def report(text: object) -> None:
    """Print on rank 0 alone, where all ranks would say the same."""
    if dist.get_rank() == 0:
        print(text)


def weights_of(model: nn.Module) -> Tensor:
    """Copy all weights of a model into one vector."""
    return parameters_to_vector(model.parameters()).detach()


def gradients_of(model: nn.Module) -> Tensor:
    """Copy all gradients of a model without frozen layers into one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
