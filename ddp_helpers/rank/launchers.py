"""Read rank, local rank and world size from the variables that the launcher sets."""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

# A variable that only this launcher sets, then its rank, local rank and world size. The first row that fits counts, as
# a whole: mpirun's ranks inherit SLURM_PROCID=0 from a batch script, and SLURM_NTASKS is the job's size, not a step's.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PMI_LOCAL_RANK", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    ending = SystemExit(" ".join(line.splitlines()))
    print(ending, file=sys.stderr, flush=True)
    ending.code = 2
    raise ending


def who_am_i(env: Mapping[str, str] = os.environ) -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size; stops where the variables contradict each other. Any rank."""
    launcher = next((name for name, (sign, *_) in LAUNCHERS.items() if sign in env), "single")
    values = [env.get(name, "") for name in LAUNCHERS.get(launcher, ())[1:]] or ["0", "0", "1"]
    rank, local_rank, world_size = (int(w) if w.isascii() and w.isdecimal() and len(w) < 19 else -1 for w in values)
    exported = [env.get("RANK", values[0]), values[1], env.get("WORLD_SIZE", values[2])]
    if values != exported or not 0 <= local_rank <= rank < world_size:
        stop(f"{launcher}: rank, local rank, world size {values}; RANK and WORLD_SIZE say {exported}: export neither")
    return launcher, rank, local_rank, world_size
