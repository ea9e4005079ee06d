"""Classify points by their spiral, one of three. Plain PyTorch, one process for each GPU.

torchrun --standalone --nproc-per-node 2 -- spirals_ddp.py --epochs 10  # or srun, mpirun
"""

import os
from argparse import ArgumentParser
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it before forming the group (docs/scripts-and-jobs.md)
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

# Where launchers set rank, local rank and world size: the last three names of a row. A
# name before them identifies this start. The first row whose names are all set counts:
# in a job, mpirun's ranks have SLURM_PROCID=0.
LAUNCHERS = [
    ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun
    (  # mpirun of Open MPI
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # mpirun of MPICH and Intel
    ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),  # srun
    ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
]


def spirals(count: int, seed: int) -> TensorDataset:  # YOUR DATA: (input, target)
    """Scatter points [count, 2] around three arms; the targets are their arms [count]."""
    generator = torch.Generator().manual_seed(seed)
    arm, radius = torch.arange(count) % 3, torch.rand(count, generator=generator)
    angle = 5 * radius + 2.1 * arm + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.view_as_real(torch.polar(radius, angle)), arm)


def main() -> None:
    """Train, test after each epoch, and save the weights to --save."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=48, help="samples in a step of all ranks")
    add("--lr", type=float, default=0.1)
    add("--save", type=Path, help="a new file, for the weights")
    args = parser.parse_args()
    if args.save and (args.save.exists() or not args.save.parent.is_dir()):
        parser.exit(2, f"--save {args.save}: give a new file in a folder that exists\n")

    rank, local_rank, world_size = 0, 0, 1  # alone, without a launcher
    for row in LAUNCHERS:
        if all(name in os.environ for name in row):
            rank, local_rank, world_size = [int(os.environ[name]) for name in row[-3:]]
            break
    else:
        for name in ("WORLD_SIZE", "SLURM_NTASKS"):  # one, but several requested
            if os.environ.get(name, "1") != "1":
                why = f"{name}={os.environ[name]}, but no launcher started this process"
                parser.exit(2, f"{why}: start it with srun, mpirun or torchrun\n")
    if args.batch_size % world_size:
        evenly = f"evenly by {world_size} ranks: give a multiple of {world_size}"
        parser.exit(2, f"--batch-size {args.batch_size} cannot be shared {evenly}\n")
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        parser.exit(2, "export MASTER_ADDR and MASTER_PORT, the same for all ranks\n")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A single GPU may be this rank's own; but torchrun's ranks all see the same ones.
    own_gpu = gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    if gpus and local_rank >= gpus and not own_gpu:
        missing = f"local rank {local_rank} has no GPU ({gpus} here)"
        parser.exit(2, f"{missing}: start fewer ranks, or export CUDA_VISIBLE_DEVICES=\n")
    device = torch.device(f"cuda:{local_rank if gpus > 1 else 0}" if gpus else "cpu")
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)
    if gpus:
        torch.cuda.set_device(device)
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(minutes=10)}
    group["store"] = None if world_size > 1 else dist.HashStore()  # alone: no other rank
    group["device_id"] = device if gpus else None
    dist.init_process_group("nccl" if gpus else "gloo", **group)
    train_set, test_set = spirals(960, seed=1), spirals(250, seed=2)
    sampler = DistributedSampler(train_set)  # one shard per rank
    train_batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    test_indices = range(rank, len(test_set), world_size)  # each sample on one rank, once
    test_batches = DataLoader(Subset(test_set, test_indices), 100)
    torch.manual_seed(1)  # the same first weights each time
    hidden = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(64, 3)).to(device)  # YOUR NETWORK
    torch.manual_seed(1 + rank)  # but different dropout on each rank
    ddp_model = DDP(model)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)  # YOUR OPTIMIZER
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # a new order
        model.train()
        for x, y in train_batches:
            loss = F.cross_entropy(ddp_model(x.to(device)), y.to(device))  # YOUR LOSS
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.tensor(0, device=device)
        with torch.no_grad():
            for x, y in test_batches:
                right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right}/{len(test_set)} right", flush=True)
    if args.save and rank == 0:
        torch.save(model.cpu().state_dict(), args.save)
    dist.barrier()  # srun --wait ends a rank 0 that still saves after the others exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
