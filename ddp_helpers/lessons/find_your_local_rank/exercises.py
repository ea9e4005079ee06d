"""The exercises of notebook 03: the GPU of a task, the local rank by host, a launcher's variables.

`lessons.check` asks them for verdicts. The second is a trial, which runs on every rank and has the
name of its exercise; the others run in the driver process.
"""

from collections.abc import Iterator, Mapping

import torch.distributed as dist

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison
from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.ranks_judge import on_real_ranks
from ddp_helpers.rank.launchers import LAUNCHERS

# ---- the GPU of a task


def gpu_index(env: Mapping[str, str]) -> int:
    """Return torch's index of the GPU of a Slurm task, which sees all GPUs of its node, or one."""
    return 0 if len(_visible(env)) == 1 else int(env["SLURM_LOCALID"])


def _visible(env: Mapping[str, str]) -> list[str]:
    """List the node's numbers of the GPUs that a task sees."""
    return env["CUDA_VISIBLE_DEVICES"].split(",")


def _task(gpus: str, local_rank: int) -> tuple[dict[str, str]]:
    """Make a case: a task with this local rank that sees these GPUs."""
    return ({"SLURM_LOCALID": str(local_rank), "CUDA_VISIBLE_DEVICES": gpus},)


_GPU_CASES = [
    _task("0,1", 1),
    _task("0,1", 0),
    _task("1,2", 1),
    _task("1", 1),
    _task("10", 1),
    _task("10,11", 0),
]
_GPU_TRAPS: dict[str, Answer] = {
    "A process that is shown one GPU calls it cuda:0.": lambda env: int(env["SLURM_LOCALID"]),
    "Those are the node's own numbers; torch counts the visible GPUs from 0.": (
        lambda env: int([*_visible(env), "0"][int(env["SLURM_LOCALID"])])
    ),
    "Count the numbers between the commas, not the characters.": (
        lambda env: 0 if len(env["CUDA_VISIBLE_DEVICES"]) == 1 else int(env["SLURM_LOCALID"])
    ),
    "That is the node's number of the first visible GPU; torch calls it cuda:0.": (
        lambda env: int(_visible(env)[0])
    ),
}

# ---- the local rank, by host


def local_rank_on(answer: Answer, _: CallLog) -> Iterator[Comparison]:
    """Compare with the place among the ranks of the same host, on hosts in any order."""
    rank = dist.get_rank()
    for hosts in (["a", "b", "b"], ["a", "b", "a"], ["a", "a", "b"]):
        hosts = hosts[: dist.get_world_size()]
        host = hosts[rank]
        known = {
            "The local rank starts again at 0 on every host.": rank,
            _TAKE_TURNS: rank % hosts.count(host),
            "Only the ranks before this one count.": hosts.count(host) - 1,
        }
        expected = hosts[:rank].count(host)
        yield Comparison(f"the local rank, of hosts {hosts}", answer(host), expected, known)


_TAKE_TURNS = "Hosts may differ, and take turns: count those before this rank that are on its host."

# ---- rank, local rank and world size of a launcher

# By launcher the names that a rank finds; the last three give rank, local rank and world size.
_NAMES = {name: LAUNCHERS[name] for name in ("torchrun", "openmpi", "slurm")}


def my_numbers(env: Mapping[str, str]) -> tuple[int, int, int]:
    """Read rank, local rank and world size by the first row of names that are all set.

    (0, 0, 1) if there is none.
    """
    return _numbers(env, _NAMES)


def _numbers(env: Mapping[str, str], table: Mapping[str, tuple[str, ...]]) -> tuple[int, int, int]:
    """Read a rank's rank, local rank and world size by a table of launchers."""
    for names in table.values():
        if all(name in env for name in names):
            rank, local_rank, world_size = (int(env[name]) for name in names[-3:])
            return rank, local_rank, world_size
    return 0, 0, 1


def _by_rank_alone(env: Mapping[str, str]) -> tuple[int, int, int]:
    """A mistake: a row counts as soon as its rank is set, and gives 0 for what is not."""
    for names in _NAMES.values():
        if names[-3] in env:
            rank, local_rank, world_size = (int(env.get(name, 0)) for name in names[-3:])
            return rank, local_rank, world_size
    return 0, 0, 1


_TORCHRUN = {"TORCHELASTIC_RUN_ID": "7f3a", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
_MPIRUN = {
    "PMIX_NAMESPACE": "prterun-node1-47@1",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
_BATCH_SCRIPT = {
    "SLURM_JOB_ID": "12",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
}
_STEP = _BATCH_SCRIPT | {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "2,3",
}
_NUMBERS_CASES = [
    (_TORCHRUN,),
    (_MPIRUN,),
    (_STEP,),
    (_BATCH_SCRIPT,),
    (_STEP | _TORCHRUN,),
    (_STEP | {"RANK": "0"},),
    ({},),
]
_NUMBERS_TRAPS: dict[str, Answer] = {
    "srun did not start that process, so it is alone: srun sets SLURM_STEP_NUM_TASKS.": (
        lambda env: _numbers(
            env, _NAMES | {"slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")}
        )
    ),
    "torchrun that srun started counts as torchrun, so look for it first.": (
        lambda env: _numbers(env, dict(reversed(_NAMES.items())))
    ),
    "A row counts if all its variables are set; a job file may have exported RANK alone.": (
        _by_rank_alone
    ),
}

EXERCISES = [
    Exercise(gpu_index, _GPU_CASES, _GPU_TRAPS),
    on_real_ranks(local_rank_on),
    Exercise(my_numbers, _NUMBERS_CASES, _NUMBERS_TRAPS),
]
