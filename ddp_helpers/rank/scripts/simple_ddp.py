"""Form a process group, wrap a small model in DDP, and see that all ranks hold the same one.

torchrun --standalone --nproc-per-node 2 simple_ddp.py
srun --ntasks-per-node=2 python simple_ddp.py
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python simple_ddp.py
"""

import os
import sys
import time
from datetime import timedelta
from socket import gethostname

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def read(*names: str) -> int:
    """The first of these variables that the launcher has set."""
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit(f"none of {', '.join(names)} is set: start this script with torchrun, srun or mpirun")


def main() -> None:
    """What every rank does."""
    rank = read("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    local_rank = read("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    world_size = read("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    print(f"Hello from rank {rank} of {world_size} on {gethostname()}, local rank {local_rank}", flush=True)

    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        backend, device = "gloo", torch.device("cpu")
    # Blocks until all ranks have come to this line. MASTER_ADDR and MASTER_PORT say where they meet.
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))

    torch.manual_seed(rank)  # different weights everywhere, until DDP sends those of rank 0 to all
    model = DDP(nn.Linear(42, 3).to(device))
    output = model(torch.ones(1, 42, device=device)).sum()
    output.backward()  # the gradients are averaged over the ranks here
    print(f"rank {rank} on {device}: output {output.item():.6f}", flush=True)

    outputs = [torch.zeros((), device=device) for _ in range(world_size)]
    dist.all_gather(outputs, output.detach())
    assert all(other == outputs[0] for other in outputs), f"the ranks hold different models: {outputs}"
    if rank == 0:
        print(f"all {world_size} ranks hold the same model", flush=True)
    dist.barrier()  # nobody leaves while a peer still needs an answer
    time.sleep(0.1)  # gloo's threads must let go of the last tensors before Python ends, or the process aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
