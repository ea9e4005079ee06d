"""The environments of ranks, as each launcher sets them: recorded, so that a test needs no launcher.

To add a launcher: write down here what it sets for a rank (SETS, and a line of RECORDED for each way in which it may
start), then a row of LAUNCHERS in rank/launchers.py, in the scripts that have the table, and in two of notebooks/,
spirals_ddp.py and spirals_resumable.py. One that may start in a Slurm job stands before `slurm`.
"""


def variables(text):
    """NAME=value, separated by blanks, as a mapping."""
    return dict(word.split("=", 1) for word in text.split())


# Recorded on Slurm 22.05: the body of a batch job of 2 nodes of 2 tasks. SLURM_PROCID is 0 in every one.
BATCH = variables("""
    CUDA_VISIBLE_DEVICES=0,1 SLURMD_NODENAME=node1 SLURM_CPUS_ON_NODE=2 SLURM_CPUS_PER_TASK=1 SLURM_GPUS_ON_NODE=2
    SLURM_GTIDS=0 SLURM_JOBID=1 SLURM_JOB_CPUS_PER_NODE=2(x2) SLURM_JOB_GPUS=0,1 SLURM_JOB_ID=1
    SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=4
    SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)
""")
# And the last task of its step: srun without arguments.
STEP = BATCH | variables("""
    MASTER_ADDR=node1 SLURMD_NODENAME=node2 SLURM_DISTRIBUTION=block SLURM_GTIDS=2,3
    SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=3 SLURM_SRUN_COMM_PORT=38871
    SLURM_STEPID=0 SLURM_STEP_GPUS=0,1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)
""")
# Node 1 of a step of 4 + 3 tasks: GTIDS are the ranks on this node.
UNEVEN = STEP | variables("""
    SLURM_GTIDS=4,5,6 SLURM_LOCALID=2 SLURM_NPROCS=7 SLURM_NTASKS=7 SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=7
    SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_TASKS_PER_NODE=4,3
""")
ONE_TASK = STEP | variables("""
    SLURM_GTIDS=0 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
""")
del ONE_TASK["MASTER_ADDR"]
INTERACTIVE = variables("SLURM_JOB_ID=77 SLURM_JOBID=77 SLURM_JOB_NODELIST=node1 SLURM_NNODES=1")
# Recorded on Open MPI 4.1: rank 1 of mpirun -n 2.
MPI = variables("""
    OMPI_APP_CTX_NUM_PROCS=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_FIRST_RANKS=0 OMPI_NUM_APP_CTX=1 OMPI_UNIVERSE_SIZE=2
    PMIX_NAMESPACE=1973354497 PMIX_RANK=1
""")
TORCHRUN = variables("""
    GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29400 RANK=2
    ROLE_NAME=default ROLE_RANK=2 ROLE_WORLD_SIZE=4 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=4
""")
# Rank 3 of Intel MPI's mpirun -n 4 -ppn 2, as far as a script reads it; MPICH sets the same.
MPICH = variables("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_RANK=3 PMI_SIZE=4 MASTER_ADDR=node1")
# Recorded on Intel MPI 2021.18, rank 1 of mpiexec.hydra -n 2. Open MPI 5.0 and MPICH 5.0 set what is said above, and
# Open MPI 5 writes PMIX_NAMESPACE=prterun-HOST-PID@1.
INTEL = variables("""
    HYDRA_BSTRAP_LAUNCHER=ssh HYDRA_BSTRAP_NODE_ID=0 I_MPI_HYDRA_UUID=106a0000-f5e6-b767-0861-0600e5753957
    MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11 PMI_RANK=1 PMI_SIZE=2
""")
# Rank 3 of HPE Cray's mpiexec, in a PBS job.
PALS = variables("""
    PALS_APID=7e1 PALS_LOCAL_RANKID=1 PALS_NODEID=1 PALS_RANKID=3 PBS_JOBID=4711.pbs PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2
    PMI_RANK=3 PMI_SIZE=4 MASTER_ADDR=node1
""")
# Recorded on Slurm 22.05: the shell of salloc -n4, with LaunchParameters=use_interactive_step.
SALLOC = variables("""
    SLURM_CPUS_ON_NODE=4 SLURM_GTIDS=0 SLURM_JOB_ID=1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_PROCID=0
    SLURM_STEPID=4294967290 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=4
""")
HAND = variables("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_PORT=29500")
# What each launcher sets, in the order of its table; other tests take a launcher's variables from here.
SETS = {"torchrun": TORCHRUN, "openmpi": MPI, "mpich": INTEL, "slurm": STEP, "pals": PALS, "env": HAND}
RECORDED = {  # environment: launcher, rank, local rank, world size
    "nothing": ({}, ("single", 0, 0, 1)),
    "interactive allocation": (INTERACTIVE, ("single", 0, 0, 1)),
    "shell of salloc": (SALLOC, ("slurm", 0, 0, 1)),
    "step": (STEP, ("slurm", 3, 1, 4)),
    "step, uneven nodes": (UNEVEN, ("slurm", 6, 2, 7)),
    "step of one task": (ONE_TASK, ("slurm", 0, 0, 1)),
    "step with PMI2": (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "10"}, ("slurm", 3, 1, 4)),
    "srun in a shell of salloc": (SALLOC | STEP, ("slurm", 3, 1, 4)),
    "torchrun": (TORCHRUN, ("torchrun", 2, 0, 4)),
    # One torchrun for each node, started by srun: Slurm then counts 2 tasks where torchrun has 4 ranks.
    "torchrun under srun": (
        STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_GTIDS": "1"} | TORCHRUN,
        ("torchrun", 2, 0, 4),
    ),
    "mpirun": (MPI, ("openmpi", 1, 1, 2)),
    "mpirun in an allocation": (BATCH | MPI, ("openmpi", 1, 1, 2)),
    "mpirun in a shell of salloc": (SALLOC | MPI, ("openmpi", 1, 1, 2)),
    "mpirun, its daemons started by srun": (
        STEP | MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        ("openmpi", 3, 1, 4),
    ),
    "mpirun of MPICH or Intel": (MPICH, ("mpich", 3, 1, 4)),
    "mpiexec.hydra of Intel": (INTEL, ("mpich", 1, 1, 2)),
    "mpirun of Intel in an allocation": (BATCH | MPICH, ("mpich", 3, 1, 4)),
    "mpirun of Intel, its daemons started by srun": (
        STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | MPICH,
        ("mpich", 3, 1, 4),
    ),
    "mpiexec of PALS": (PALS, ("pals", 3, 1, 4)),
    "mp.spawn": (HAND, ("env", 1, 1, 2)),
    "mp.spawn on two nodes": (HAND | {"RANK": "3", "WORLD_SIZE": "4"}, ("env", 3, 1, 4)),
}
