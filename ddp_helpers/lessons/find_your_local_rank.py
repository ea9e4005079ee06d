"""Exercises of notebook 03."""

from collections.abc import Mapping, Sequence

from ddp_helpers.lessons.exercise import Exercise

# A variable that gives a launcher away, then its names for rank, local rank and world size.
NAMES = {
    "TORCHELASTIC_RUN_ID": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
}


def seat(rank: int, gpus: Sequence[int]) -> tuple[int, int]:
    """(node, local rank) of a rank, if node n has gpus[n] GPUs and the nodes are filled one after the other."""
    node = 0
    while rank >= gpus[node]:
        rank, node = rank - gpus[node], node + 1
    return node, rank


def formula_works(gpus: Sequence[int]) -> bool:
    """Whether rank % (GPUs of its own node) is the local rank of every rank."""
    places = [seat(rank, gpus) for rank in range(sum(gpus))]
    return all(rank % gpus[node] == local for rank, (node, local) in enumerate(places))


def who_am_i(env: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, world size) under torchrun, mpirun, a Slurm step, or (0, 0, 1) under none of them."""
    return from_table(env, NAMES)


def gpu_index(env: Mapping[str, str]) -> int:
    """The index that torch has for the GPU of a Slurm task, which may see all GPUs of its node or one."""
    return 0 if len(env["CUDA_VISIBLE_DEVICES"].split(",")) == 1 else int(env["SLURM_LOCALID"])


def from_table(env: Mapping[str, str], table: Mapping[str, tuple[str, ...]]) -> tuple[int, int, int]:
    """The three numbers, by the names of the first launcher of the table that is there."""
    for sign, names in table.items():
        if sign in env:
            rank, local_rank, world_size = (int(env[name]) for name in names)
            return rank, local_rank, world_size
    return 0, 0, 1


def by_procid(env: Mapping[str, str]) -> tuple[int, int, int]:
    """A mistake: SLURM_PROCID is taken for the sign of a step."""
    names, wrong = NAMES["SLURM_STEP_NUM_TASKS"], ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    return from_table(env, {key: value for key, value in NAMES.items() if value != names} | {"SLURM_PROCID": wrong})


def slurm_first(env: Mapping[str, str]) -> tuple[int, int, int]:
    """A mistake: a Slurm step is looked for before torchrun."""
    return from_table(env, dict(reversed(NAMES.items())))


def strings(env: Mapping[str, str]) -> tuple:
    """A mistake: the values as they are."""
    signs = [sign for sign in NAMES if sign in env]
    return tuple(env[name] for name in NAMES[signs[0]]) if signs else (0, 0, 1)


MASTER = {"MASTER_ADDR": "node1"}  # with it, and with the ranks of a node, the course's own Topology can answer too
TORCHRUN = MASTER | {"TORCHELASTIC_RUN_ID": "7f3a", "RANK": "5", "WORLD_SIZE": "8"}
TORCHRUN |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MPIRUN = MASTER | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
BATCH = MASTER | {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
STEP = BATCH | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "2,3"}


def sees(gpus: str, local_rank: int) -> tuple[dict[str, str]]:
    """A case: a task with this local rank that is shown these GPUs."""
    return ({"SLURM_LOCALID": str(local_rank), "CUDA_VISIBLE_DEVICES": gpus},)


EXERCISES = [
    Exercise(
        seat,
        [(3, (1, 2, 4)), (0, (2, 2)), (2, (1, 2)), (5, (4, 4)), (6, (4, 2, 2))],
        {
            "Nodes differ: take away the GPUs of one node after the other.": lambda rank, gpus: divmod(rank, gpus[0]),
            "The local rank starts again at 0 on every node.": lambda rank, gpus: (seat(rank, gpus)[0], rank),
        },
    ),
    Exercise(
        formula_works,
        [((2, 2),), ((1, 2),), ((2, 1),), ((4, 2),), ((2, 4),), ((3, 2),), ((1, 2, 4),)],
        {
            "Equal nodes are safe, and some unequal ones too: try every rank.": lambda gpus: len(set(gpus)) == 1,
            "Larger nodes first is not enough: on (3, 2) rank 3 has 3 % 2 = 1.": lambda gpus: (
                list(gpus) == sorted(gpus, reverse=True)
            ),
        },
    ),
    Exercise(
        who_am_i,
        [(TORCHRUN,), (MPIRUN,), (STEP,), (BATCH,), (STEP | TORCHRUN,), ({},)],
        {
            "That is the batch script, a single process: only a step has SLURM_STEP_NUM_TASKS.": by_procid,
            "torchrun inside a step counts as torchrun, so look for it first.": slurm_first,
            "What the environment holds are strings: make them int.": strings,
        },
    ),
    Exercise(
        gpu_index,
        [sees("0,1", 1), sees("0,1", 0), sees("1", 1), sees("10", 1), sees("10,11", 0)],
        {
            "A task that is shown one GPU calls it cuda:0.": lambda env: int(env["SLURM_LOCALID"]),
            "Those are the node's own numbers; torch counts the visible GPUs from 0.": lambda env: int(
                [*env["CUDA_VISIBLE_DEVICES"].split(","), "0"][int(env["SLURM_LOCALID"])]
            ),
            "Count the numbers between the commas, not the characters.": lambda env: (
                0 if len(env["CUDA_VISIBLE_DEVICES"]) == 1 else int(env["SLURM_LOCALID"])
            ),
        },
    ),
]
