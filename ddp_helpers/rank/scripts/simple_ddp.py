"""Form a process group, wrap a small model in DDP, and see that all ranks hold the same one.

torchrun --standalone --nproc-per-node 2 -- simple_ddp.py
mpirun -n 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 python simple_ddp.py    # on one node
srun --nodes=1 --ntasks=2 env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python simple_ddp.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers.rank.device import may_share
from ddp_helpers.rank.launchers import LAUNCHERS, stop


def main() -> None:
    """Do what every rank does."""
    rows = (row for row in LAUNCHERS.items() if row[1][0] in os.environ)
    launcher, (_, *names) = next(rows, ("single", [""]))
    rank, local_rank, world_size = [int(os.environ[name]) for name in names] or (0, 0, 1)
    who = f"rank {rank} of {world_size}, local rank {local_rank}"
    print(f"Hello from {who}, started by {launcher}", flush=True)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # One GPU may be this rank's own, as with Slurm's --gpus-per-task=1, but not under torchrun.
    if local_rank >= gpus > (0 if launcher == "torchrun" and not may_share() else 1):
        cure = "start fewer ranks, or use the CPUs: export CUDA_VISIBLE_DEVICES="
        stop(f"local rank {local_rank} has no GPU ({gpus} here): {cure}")
    if world_size == 1:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = "0"  # any port: nobody else comes
    elif not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        stop("export MASTER_ADDR and MASTER_PORT, the same for all ranks, or start with torchrun")
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", min(local_rank, gpus - 1))  # the only one seen is cuda:0
        torch.cuda.set_device(device)
    # Imported after this, by DDP, torch.distributed.nn would keep the group and its threads.
    dist.init_process_group(  # waits for all ranks
        "nccl" if gpus else "gloo",
        timeout=timedelta(seconds=60),
        rank=rank,
        world_size=world_size,
        device_id=device if gpus else None,
    )
    torch.manual_seed(rank)  # different weights everywhere, until DDP sends those of rank 0 to all
    model = DDP(nn.Linear(42, 3).to(device))
    output = model(torch.ones(1, 42, device=device)).sum()
    output.backward()  # the gradients are averaged over the ranks here
    outputs = [torch.zeros((), device=device) for _ in range(world_size)]
    dist.all_gather(outputs, output.detach())
    are_equal = all(other == outputs[0] for other in outputs)
    assert are_equal, f"the ranks hold different models: {outputs}"
    print(f"rank {rank} on {device}: output {output.item():.6f}", flush=True)
    if rank == 0:
        print(f"all {world_size} ranks hold the same model", flush=True)
    dist.barrier()  # nobody leaves while a peer still needs an answer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
