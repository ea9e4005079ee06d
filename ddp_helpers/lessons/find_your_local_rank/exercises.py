"""Exercises of notebook 03: numbers read from a launcher's variables, and the GPU of a rank."""

from collections.abc import Mapping

import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, each_its_own
from ddp_helpers.rank.launchers import LAUNCHERS

NAMES = {LAUNCHERS[launcher][0]: LAUNCHERS[launcher][1:] for launcher in ("torchrun", "openmpi", "slurm")}
BY_PROCID = NAMES | {"SLURM_PROCID": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")}  # a mistake: no sign of a step


def local_rank_on(host: str) -> int:
    """Number the ranks of each host from 0, in the order of their ranks; host is the calling rank's."""
    return hosts_of_all(host)[: dist.get_rank()].count(host)


def hosts_of_all(host: str) -> list[str]:
    """The hosts of all ranks."""
    hosts = [host] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    return hosts


def my_numbers(env: Mapping[str, str], table: Mapping[str, tuple[str, ...]] = NAMES) -> tuple[int, int, int]:
    """(rank, local rank, world size), by the names of the first launcher of the table that is there; else (0, 0, 1)."""
    for sign, names in table.items():
        if sign in env:
            rank, local_rank, world_size = (int(env[name]) for name in names)
            return rank, local_rank, world_size
    return 0, 0, 1


def gpu_index(env: Mapping[str, str]) -> int:
    """The index that torch has for the GPU of a Slurm task, which may see all GPUs of its node or one."""
    return 0 if len(env["CUDA_VISIBLE_DEVICES"].split(",")) == 1 else int(env["SLURM_LOCALID"])


TORCHRUN = {"TORCHELASTIC_RUN_ID": "7f3a", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
BATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
STEP = BATCH | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_GTIDS": "2,3"}


def sees(gpus: str, local_rank: int) -> tuple[dict[str, str]]:
    """A case: a task with this local rank that is shown these GPUs."""
    return ({"SLURM_LOCALID": str(local_rank), "CUDA_VISIBLE_DEVICES": gpus},)


EXERCISES = [
    OnRanks(
        local_rank_on,
        [(("a",), ("b",), ("b",)), (("a",), ("b",), ("a",)), (("a",), ("a",))],
        {
            "The local rank starts again at 0 on every host.": lambda host: dist.get_rank(),
            "Hosts may differ, and take turns: count those before this rank that are on its host.": lambda host: (
                dist.get_rank() % hosts_of_all(host).count(host)
            ),
            "A host's ranks need not be neighbours: count those before this rank that are on its host.": lambda host: (
                dist.get_rank() - hosts_of_all(host).index(host)
            ),
            "That is the first rank of this host: count those between it and this rank.": lambda host: hosts_of_all(
                host
            ).index(host),
            "Only the ranks before this one count.": lambda host: hosts_of_all(host).count(host) - 1,
        },
        each_its_own,
    ),
    Exercise(
        my_numbers,
        [(TORCHRUN,), (MPIRUN,), (STEP,), (BATCH,), (STEP | TORCHRUN,), ({},)],
        {
            "That is the batch script, a single process: only a step has SLURM_STEP_NUM_TASKS.": lambda env: my_numbers(
                env, BY_PROCID
            ),
            "torchrun inside a step counts as torchrun, so look for it first.": lambda env: my_numbers(
                env, dict(reversed(NAMES.items()))
            ),
            "What the environment holds are strings: make them int.": lambda env: (
                tuple(map(str, my_numbers(env))) if env.keys() & NAMES else (0, 0, 1)
            ),
        },
    ),
    Exercise(
        gpu_index,
        [sees("0,1", 1), sees("0,1", 0), sees("1,2", 1), sees("1", 1), sees("10", 1), sees("10,11", 0)],
        {
            "A task that is shown one GPU calls it cuda:0.": lambda env: int(env["SLURM_LOCALID"]),
            "Those are the node's own numbers; torch counts the visible GPUs from 0.": lambda env: int(
                [*env["CUDA_VISIBLE_DEVICES"].split(","), "0"][int(env["SLURM_LOCALID"])]
            ),
            "Count the numbers between the commas, not the characters.": lambda env: (
                0 if len(env["CUDA_VISIBLE_DEVICES"]) == 1 else int(env["SLURM_LOCALID"])
            ),
            "That is the node's number of the first visible GPU; torch calls it cuda:0.": lambda env: int(
                env["CUDA_VISIBLE_DEVICES"].split(",")[0]
            ),
            "The local rank counts places in the list; it is no number that stands in it.": lambda env: (
                env["CUDA_VISIBLE_DEVICES"].split(",").index(env["SLURM_LOCALID"])
            ),
        },
    ),
]
