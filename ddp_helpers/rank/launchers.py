"""Who this process is: rank, local rank and world size from one table of launchers; and its CPUs.

Every script calls `who_am_i` first, on every rank. It needs the standard library.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import NoReturn

# A variable that only this launcher sets, then its rank, local rank and world size. The first
# row that fits counts, as a whole: mpirun's ranks inherit SLURM_PROCID=0 from a batch script,
# and SLURM_NTASKS is the job's size, not a step's.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PMI_LOCAL_RANK", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}

# What names one start by this launcher: the same on all its ranks, on every node, and another
# at each start. MPICH and whoever exports RANK by hand set no such name. On several nodes give
# the torchruns a fixed --master-addr: with --rdzv-backend=c10d they may count restarts unlike.
STARTS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    "openmpi": ("PMIX_NAMESPACE",),
    "mpich": ("I_MPI_HYDRA_UUID",),  # of Intel MPI alone
    "slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "pals": ("PALS_APID",),
    "env": (),
}

# Two classes stand behind the backend "nccl". Read in torch 2.15, where the newer became the
# default: its getFuture, which DDP calls for each bucket, makes the computing stream wait, so
# that nothing overlaps. This takes the older one, in 2.14 as in 2.15; before, no torch reads it.
OLDER_NCCL = "TORCH_DIST_USE_NCCL2", "0"


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def who_am_i(env: Mapping[str, str] = os.environ) -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size from the environment; every rank calls it.

    Stops where the variables contradict each other.
    """
    launcher = next((name for name, (sign, *_) in LAUNCHERS.items() if sign in env), "single")
    names = LAUNCHERS.get(launcher, ())[1:]
    values = [env.get(name, "") for name in names] or ["0", "0", "1"]
    numbers = [int(value) if re.fullmatch("[0-9]{1,18}", value) else -1 for value in values]
    rank, local_rank, world_size = numbers
    exported = [env.get("RANK", values[0]), values[1], env.get("WORLD_SIZE", values[2])]
    if values != exported or not 0 <= local_rank <= rank < world_size:
        stop(
            f"{launcher}: rank, local rank, world size {values}; "
            f"RANK, WORLD_SIZE {exported}: export neither, or all"
        )
    return launcher, rank, local_rank, world_size


def name_of_start(launcher: str) -> str:
    """Name this start of the ranks, the same on all of them; every rank calls it.

    It stands before each key in the store where they meet: another job may come there, too.
    """
    names = ("USER", *STARTS.get(launcher, ()))
    return " ".join(os.environ.get(name, "") for name in names)


def cpus_of_rank() -> int:
    """Count the CPUs that this process has to itself; any process calls it.

    They are those of its Slurm task, or its share of torchrun's.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cpus = len(os.sched_getaffinity(0))
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's ranks on this node
    task_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task_cpus.isdecimal() and int(task_cpus):
        cpus = min(cpus, int(task_cpus))  # of the task, which is torchrun with all its ranks
    return max(1, cpus // max(1, int(sharing) if sharing.isdecimal() else 1))
