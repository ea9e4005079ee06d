"""Are the replicas still the same? A digest of the weights on every rank, compared."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from ddp_helpers.rank.topology import stop


def weight_digest(model: nn.Module) -> str:
    """SHA-256 of all weights and buffers, to the bit; any rank may call it."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def check_replicas(model: nn.Module, when: str) -> str:
    """The digest that all replicas share; every rank calls it. Stops on all ranks where one differs, and names it."""
    digests = [weight_digest(model)] * dist.get_world_size()
    dist.all_gather_object(digests, digests[0])
    common = max(digests, key=digests.count)
    odd = ", ".join(str(rank) for rank, digest in enumerate(digests) if digest != common)
    if odd:
        stop(
            f"{when}: rank {odd} has other weights than rank {digests.index(common)}: find what changes them on one "
            "rank only, such as a weight set after DDP wrapped the model"
        )
    return common
