"""Find rank, local rank and world size, by a table of launchers, and the number of CPUs.

The scripts contain the same table and `who_am_i`. It needs only the standard library.
"""

import os
import sys
from typing import NoReturn

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


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


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


def cpus_of_rank() -> int:
    """Count the CPUs that this process does not share; any process calls it.

    These are the CPUs of its Slurm task, or its share of torchrun's CPUs.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cpus = len(os.sched_getaffinity(0))
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's ranks on this node
    task_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task_cpus.isdecimal() and int(task_cpus):
        cpus = min(cpus, int(task_cpus))  # of the task: torchrun with all its ranks
    return max(1, cpus // max(1, int(sharing) if sharing.isdecimal() else 1))
