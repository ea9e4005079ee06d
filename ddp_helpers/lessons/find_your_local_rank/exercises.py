"""The exercises of notebook 03: the GPU of a task, the local rank by host, a launcher's variables.

`lessons.check` asks them for verdicts. The second runs on ranks that `on_ranks` forks, where every
rank calls the answer; the others run in the learner's process.
"""

from collections.abc import Mapping

import torch.distributed as dist

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case
from ddp_helpers.rank.launchers import LAUNCHERS

# ---- the GPU of a task


def gpu_index(env: Mapping[str, str]) -> int:
    """Return torch's index of the GPU of a Slurm task, which sees all GPUs of its node, or one."""
    return 0 if len(_visible(env)) == 1 else int(env["SLURM_LOCALID"])


def _visible(env: Mapping[str, str]) -> list[str]:
    """List the node's numbers of the GPUs that a task sees."""
    return env["CUDA_VISIBLE_DEVICES"].split(",")


def _first_visible(env: Mapping[str, str]) -> int:
    """A mistake: the node's number of the first GPU that a task sees."""
    return int(_visible(env)[0])


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
_GPU_TRAPS = {
    "A task that is shown one GPU calls it cuda:0.": lambda env: int(env["SLURM_LOCALID"]),
    "Those are the node's own numbers; torch counts the visible GPUs from 0.": (
        lambda env: int([*_visible(env), "0"][int(env["SLURM_LOCALID"])])
    ),
    "Count the numbers between the commas, not the characters.": (
        lambda env: 0 if len(env["CUDA_VISIBLE_DEVICES"]) == 1 else int(env["SLURM_LOCALID"])
    ),
    "That is the node's number of the first visible GPU; torch calls it cuda:0.": _first_visible,
    "The local rank counts places in the list; it is no number that stands in it.": (
        lambda env: _visible(env).index(env["SLURM_LOCALID"])
    ),
}

# ---- the local rank, by host


def local_rank_on(host: str) -> int:
    """Number the ranks of each host from 0, in the order of their ranks.

    Every rank calls it with its own host.
    """
    return _hosts_of_all(host)[: dist.get_rank()].count(host)


def _hosts_of_all(host: str) -> list[str]:
    """Collect the hosts of all ranks; every rank calls it with its own."""
    hosts = [host] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    return hosts


_LOCAL_RANK_TRAPS = {
    "The local rank starts again at 0 on every host.": lambda host: dist.get_rank(),
    "Hosts may differ, and take turns: count those before this rank that are on its host.": (
        lambda host: dist.get_rank() % _hosts_of_all(host).count(host)
    ),
    "A host's ranks need not be neighbours: count those before this rank that are on its host.": (
        lambda host: dist.get_rank() - _hosts_of_all(host).index(host)
    ),
    "That is the first rank of this host: count those between it and this rank.": (
        lambda host: _hosts_of_all(host).index(host)
    ),
    "Only the ranks before this one count.": lambda host: _hosts_of_all(host).count(host) - 1,
}

# ---- the numbers of a launcher

# By launcher the names that a rank finds, of which the last three are its numbers.
_Names = dict[str, tuple[str, ...]]
_NAMES: _Names = {name: LAUNCHERS[name] for name in ("torchrun", "openmpi", "slurm")}
# A mistake: the batch script has these three, too; only a step has SLURM_STEP_NUM_TASKS.
_WITH_BATCH_SCRIPT = _NAMES | {"slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")}


def my_numbers(env: Mapping[str, str], table: _Names = _NAMES) -> tuple[int, int, int]:
    """Read rank, local rank and world size by the first row of names that are all set.

    (0, 0, 1) if there is none. Another table than the default is a mistake.
    """
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


def _numbers_as_text(env: Mapping[str, str]) -> tuple[str, ...] | tuple[int, int, int]:
    """A mistake: the values are left as they stand in the environment."""
    whole = any(all(name in env for name in names) for names in _NAMES.values())
    return tuple(map(str, my_numbers(env))) if whole else (0, 0, 1)


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
_NUMBERS_TRAPS = {
    "That is the batch script, a single process: only a step has SLURM_STEP_NUM_TASKS.": (
        lambda env: my_numbers(env, _WITH_BATCH_SCRIPT)
    ),
    "torchrun inside a step counts as torchrun, so look for it first.": (
        lambda env: my_numbers(env, dict(reversed(_NAMES.items())))
    ),
    "A row counts if all its variables are set; a job file may have exported RANK alone.": (
        _by_rank_alone
    ),
    "What the environment holds are strings: make them int.": _numbers_as_text,
}

EXERCISES = [
    Exercise(gpu_index, _GPU_CASES, _GPU_TRAPS),
    OnRanks(
        local_rank_on,
        [(("a",), ("b",), ("b",)), (("a",), ("b",), ("a",)), (("a",), ("a",))],
        _LOCAL_RANK_TRAPS,
        call_with_own_case,
    ),
    Exercise(
        my_numbers,
        [
            (_TORCHRUN,),
            (_MPIRUN,),
            (_STEP,),
            (_BATCH_SCRIPT,),
            (_STEP | _TORCHRUN,),
            (_STEP | {"RANK": "0"},),
            ({},),
        ],
        _NUMBERS_TRAPS,
    ),
]
