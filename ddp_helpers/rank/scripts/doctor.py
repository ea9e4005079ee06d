"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

torchrun --standalone --nproc-per-node 2 doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

import sys

from ddp_helpers.rank.doctor.examine import examine


def main() -> None:
    """End with 0 if all is green, 1 if a row is red, 2 if the arguments are wrong."""
    sys.exit(examine())


if __name__ == "__main__":
    main()
