"""Form a process group, wrap a small model in DDP, and check that all ranks have the same weights.

torchrun --standalone --nproc-per-node 2 -- simple_ddp.py
mpirun -n 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 python simple_ddp.py    # on one node
srun --nodes=1 --ntasks=2 env MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python simple_ddp.py
With --no-cuda the ranks use CPUs, although there are GPUs. Your own script next to this file can
import who_am_i, pick_device and form_group from it.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: imported later, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    """Run the whole demonstration; every rank calls it."""
    launcher, rank, local_rank, world_size = who_am_i()
    who = f"rank {rank} of {world_size}, local rank {local_rank}"
    print(f"Hello from {who}, started by {launcher}", flush=True)
    device = pick_device(local_rank, "--no-cuda" in sys.argv)
    form_group(rank, world_size, device, timeout=60)
    torch.manual_seed(rank)  # different weights on each rank, until DDP broadcasts rank 0's
    model = DDP(nn.Linear(42, 3).to(device))
    model(torch.ones(1, 42, device=device)).sum().backward()  # averages the gradients
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.zeros_like(weights) for _ in range(world_size)]
    dist.all_gather(everyone, weights)
    assert all(other.equal(everyone[0]) for other in everyone), "the ranks hold different models"
    print(f"rank {rank} on {device}: the weights' sum is {weights.sum().item():.6f}", flush=True)
    if rank == 0:
        print(f"all {world_size} ranks hold the same model", flush=True)
    dist.barrier()  # no rank exits while a peer still needs an answer
    dist.destroy_process_group()


# The variables that launchers export: the last three are rank, local rank and world size; the ones
# before identify this start. The first row whose variables are all set counts: inside a Slurm job,
# mpirun's ranks also have SLURM_PROCID=0.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # also Intel MPI
    "slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}


def who_am_i() -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size from the environment; every rank calls it."""
    for launcher, names in LAUNCHERS.items():
        if all(name in os.environ for name in names):
            rank, local_rank, world_size = (int(os.environ[name]) for name in names[-3:])
            return launcher, rank, local_rank, world_size
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name, "1") != "1":
            cure = "start it with srun, mpirun or torchrun"
            sys.exit(f"{name}={os.environ[name]}, but no launcher started this process: {cure}")
    return "single", 0, 0, 1


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim the GPU of this local rank, or the only one that it sees; the CPU if none can be used.

    Every rank calls it. Stops if there are fewer GPUs than ranks, or the given ones cannot be used.
    """
    count = 0 if no_cuda else torch.cuda.device_count()  # includes GPUs that CUDA cannot use
    given = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("SLURM_JOB_GPUS", ""))
    # The only one may be this rank's own, as with --gpus-per-task=1; torchrun's ranks all see it.
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    may_take_it = count == 1 and (may_share or "TORCHELASTIC_RUN_ID" not in os.environ)
    if count and local_rank >= count and not may_take_it:
        cure = f"start {count} on a node, or give --no-cuda"
        sys.exit(f"local rank {local_rank} has no GPU ({count} here): {cure}")
    device = torch.device("cuda", min(local_rank, count - 1)) if count else torch.device("cpu")
    why = f"torch {torch.__version__} sees none"
    try:
        if count:
            # The older of torch's two NCCL classes: it overlaps communication with computing.
            os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
            torch.cuda.set_device(device)
            torch.zeros(1, device=device).add_(1)  # too old a driver or GPU raises here
            return device
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    if given not in ("", "-1", "NoDevFiles") and not no_cuda:
        sys.exit(f"GPU {given} is given, but {why}: see nvidia-smi, or give --no-cuda")
    if count:
        print(f"the CPU is used, and not the GPU: {why}", file=sys.stderr, flush=True)
    return torch.device("cpu")


def form_group(rank: int, world_size: int, device: torch.device, timeout: float) -> None:
    """Form the group of all ranks: NCCL on GPUs, gloo on CPUs; stops after timeout seconds."""
    if world_size > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        cure = "the same for all ranks, or start with torchrun"
        sys.exit(f"export MASTER_ADDR and MASTER_PORT, {cure}")
    dist.init_process_group(  # waits for all ranks
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout),
        rank=rank,
        world_size=world_size,
        store=None if world_size > 1 else dist.HashStore(),  # alone: no other rank
        device_id=device if device.type == "cuda" else None,
    )


if __name__ == "__main__":
    main()
