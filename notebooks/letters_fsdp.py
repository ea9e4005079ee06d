"""Train the transformer of letters.py, sharded by FSDP2; one process for each GPU.

torchrun --standalone --nproc-per-node 2 -- letters_fsdp.py --save new.pt
Needs letters.py next to it. Your own network and data replace the lines with YOUR.
"""

import os
import sys
import warnings
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from letters import Net, datasets  # YOUR NETWORK, YOUR DATA
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# PyTorch 2.14 warns about in-place operations on an output; there are none here.
warnings.filterwarnings("ignore", "FSDP2-wrapped module")


def sharded(weights: dict, bf16: bool, device: torch.device) -> nn.Module:
    """Make the sharded model from rank 0's full weights; all ranks call it."""
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    out = torch.float32 if bf16 else None  # the loss in float32: only the root module
    with torch.device("meta"):  # shapes without memory: the full model need not fit
        model = Net()
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**half))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**half, output_dtype=out))
    model.to_empty(device=device)  # set buffers that no state_dict has here yourself
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, weights, options=options)
    return model


def mean_loss(model: nn.Module, samples: Dataset, device: torch.device) -> float:
    """Return the mean loss of a text; all ranks call it, with equal forward counts."""
    last, world_size = len(samples) - 1, dist.get_world_size()
    sums = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for first in torch.arange(0, len(samples), world_size).split(32):
            places = first + dist.get_rank()
            text, following = (t.to(device) for t in samples[places.clamp(max=last)])
            losses = F.cross_entropy(model(text).mT, following, reduction="none")
            # A sample past the end only keeps the ranks in step.
            counted = (places <= last).to(device)
            sums += torch.stack([losses.mean(dim=1)[counted].sum(), counted.sum()])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    """Train, test after each epoch, and save the full weights to --save."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, default=32, help="texts in a step of all ranks")
    add("--micro-batches", type=int, default=2, help="micro-batches of a rank's shard")
    add("--lr", type=float, default=0.001)
    add("--bf16", action="store_true", help="compute in bfloat16, which needs no scaler")
    add("--weights", type=Path, help="a file: the first weights of the whole model")
    add("--save", type=Path, help="a file for the last weights of the whole model")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start it with torchrun, as its first lines say")
    pieces = int(os.environ["WORLD_SIZE"]) * args.micro_batches
    if args.batch_size % pieces:
        sys.exit(f"--batch-size {args.batch_size}: give a multiple of {pieces}")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    on_gpus = device.type == "cuda"
    group = {"timeout": timedelta(minutes=10), "device_id": device if on_gpus else None}
    dist.init_process_group("nccl" if on_gpus else "gloo", **group)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = datasets(Path())
    sampler = DistributedSampler(train_set)  # one shard per rank
    batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    torch.manual_seed(1)
    weights = {}
    if rank == 0:  # no other rank reads the file, or makes the full model
        made = Net().state_dict
        file = args.weights
        weights = torch.load(file, "cpu", weights_only=True) if file else made()
    model = sharded(weights, args.bf16, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after fully_shard
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for batch in batches:
            parts = (part.to(device).chunk(args.micro_batches) for part in batch)
            pieces = list(zip(*parts, strict=True))  # fewer for a small last batch
            for number, (text, following) in enumerate(pieces, 1):
                # Fewer messages, but full gradients until the last micro-batch: omit it
                # if memory is short.
                model.set_requires_gradient_sync(number == len(pieces))
                share = len(text) / len(batch[0])
                (F.cross_entropy(model(text).mT, following) * share).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards
            optimizer.step()
            optimizer.zero_grad()
        loss = mean_loss(model, test_set, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} of {len(test_set)} texts", flush=True)
    if args.save:  # all ranks gather, and rank 0 writes
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = state_dict.get_model_state_dict(model, options=options)
        if rank == 0:
            torch.save(weights, args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
