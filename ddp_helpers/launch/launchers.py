"""Command lines and environments with which torchrun, mpirun, srun or Python start the ranks.

It runs in the driver process; in a job, in the notebook's kernel.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import ddp_tools
from ddp_helpers.rank.launchers import LAUNCHERS, cpus_of_rank
from ddp_tools.one_machine import HIDES_GPUS, LOOPBACK_ONLY, free_port

# torchrun, whose rendezvous listens on this machine alone. By its path, since nothing need be
# installed; -P, so that modules next to it do not shadow others of the same names.
MEETING = Path(ddp_tools.__file__).with_name("rendezvous.py")
TORCHRUN = [sys.executable, "-P", str(MEETING)]

# What launchers export to their ranks: the names by which a rank finds its numbers and its start,
# and the rest of these families. SBATCH_ACCOUNT, SLURM_ACCOUNT and other settings of people are not
# included: no job sets them itself.
KNOWN_BY = {name for names in LAUNCHERS.values() for name in names}
INHERITED = re.compile(
    rf"({'|'.join(sorted(KNOWN_BY))})$"
    r"|(PMIX?|PMI2|OMPI|PALS|TORCHELASTIC|MASTER|GROUP|ROLE)_"
    r"|SLURMD?(?!_(ACCOUNT|PARTITION|QOS|RESERVATION)$)_"
    r"|(SBATCH_(CPU|MEM)|SRUN)_"
)

# How each launcher marks a rank's line; lines without a mark are the launcher's own.
LINE_PATTERNS = {
    "torchrun": r"\[rank(\d+)\]:(.*)",
    "mpirun": r"\[\d+,(\d+)\]<\w+>: ?(.*)",  # Open MPI 5 has a space there, Open MPI 4 has none
    "srun": r" *(\d+): (.*)",
    "python": r"()(.*)",
}


# ---- environments


def clean_environment() -> dict[str, str]:
    """Return this process's environment without any launcher's variables.

    If the course's own Slurm is up, and the machine has no other, SLURM_CONF points to it.
    """
    inherited = {name for name in os.environ if INHERITED.match(name)} - {"SLURM_CONF"}
    env = {name: text for name, text in os.environ.items() if name not in inherited}
    # Jupyter's kernel sets FORCE_COLOR, and from 3.13 on Python then colours tracebacks letter by
    # letter.
    env["PYTHON_COLORS"] = "0"
    state = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ddp-course"
    of_the_site = Path("/etc/slurm/slurm.conf").exists()
    if "SLURM_CONF" not in env and not of_the_site and (state / "slurm.conf").is_file():
        env["SLURM_CONF"] = str(state / "slurm.conf")
    return env


def launch_environment(per_node: Sequence[int], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: unbuffered, CPUs shared, GPUs if there are enough.

    per_node: how many ranks each node has; extra: more variables, which override all others.
    """
    size = sum(per_node)
    env = clean_environment()
    env["PYTHONUNBUFFERED"] = "1"
    env["OMP_NUM_THREADS"] = str(max(1, cpus_of_rank() // size))
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]:"
    if len(per_node) > 1 or not enough_gpus(size):  # or several simulated nodes
        env |= dict.fromkeys(HIDES_GPUS, "")
    if os.geteuid() == 0:  # as in a container; mpirun refuses root otherwise
        env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return env | dict(extra)


def rank_environments(size: int, extra: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each rank of one group on this machine, numbered as by torchrun.

    extra: more variables for all ranks.
    """
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    shared = launch_environment([size], {**LOOPBACK_ONLY, **group, **extra})
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def enough_gpus(ranks: int) -> bool:
    """Return whether each rank can have a GPU of this machine, or NCCL lets all share one."""
    gpus = len(gpu_names())
    if gpus != 1 or ranks == 1:
        return ranks <= gpus
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # not tried here


def gpu_names() -> list[str]:
    """Name the GPUs of this machine that ranks can use."""
    import torch  # here: it takes seconds, and a notebook that hands its job to Slurm needs none

    # The count comes from NVML, and does not start CUDA.
    return _ask_cuda(os.environ.get("CUDA_VISIBLE_DEVICES")) if torch.cuda.device_count() else []


@cache
def _ask_cuda(_visible: str | None) -> list[str]:
    """Name the GPUs that CUDA can use, and print to stderr, once, why it cannot use another.

    A separate process asks, which takes some seconds. Even torch.cuda.is_available() starts CUDA's
    driver (cuInit), and processes forked afterwards cannot use CUDA: neither for a tensor nor for a
    backward on CPUs, which makes a thread for each GPU. A notebook forks ranks.
    """
    program = (
        "import torch; from ddp_helpers.rank.device import pick_device\n"
        "for index in range(torch.cuda.device_count()):\n"
        "    if pick_device(index).type == 'cuda': print(torch.cuda.get_device_name(index))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = [sys.executable, "-P", "-c", program]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=False)
    if why := done.stderr.strip():
        print(why, file=sys.stderr, flush=True)
    return done.stdout.splitlines()


# ---- command lines


def launch_commands(
    launcher: str,
    program: list[str],
    per_node: Sequence[int],
    logs: str,
) -> list[list[str]]:
    """Return the command lines that start the ranks: one, or with torchrun one for each node.

    program: a script and its arguments; per_node: how many ranks each node has; logs: a folder for
    torchrun's files. Raises FileNotFoundError if the launcher is not on this machine.
    """
    if launcher == "python":
        return [[sys.executable, *program]]
    if launcher == "torchrun":
        return _torchrun_commands(program, per_node, logs)
    if not shutil.which(launcher):
        cure = "install it, or use launcher='torchrun'"
        raise FileNotFoundError(f"{launcher} is not on this machine: {cure}")
    make_command = {"mpirun": _mpirun_command, "srun": _srun_command}[launcher]
    return [make_command(program, per_node)]


def _torchrun_commands(program: list[str], per_node: Sequence[int], logs: str) -> list[list[str]]:
    # The static rendezvous, even on one node: the c10d one of --standalone unpickles its state from
    # the store every few seconds, and anybody with a login on this machine can write to the store.
    meeting = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    # Without "--" torchrun would read a script's --n as its own --nnodes or a similar flag.
    torchrun = [*TORCHRUN, "--role=rank", "--tee=3", f"--log-dir={logs}", *meeting]
    torchrun.append(f"--nnodes={len(per_node)}")
    return [
        [*torchrun, f"--node-rank={node}", f"--nproc-per-node={ranks}", "--", *program]
        for node, ranks in enumerate(per_node)
    ]


def _mpirun_command(program: list[str], per_node: Sequence[int]) -> list[str]:
    options = ["--tag-output", "--oversubscribe", "--bind-to", "none"]
    options += ["-x", "PYTHONUNBUFFERED="]  # unbuffered, it would mark each part of a line
    options += ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    return ["mpirun", *options, "-n", str(sum(per_node)), sys.executable, *program]


def _srun_command(program: list[str], per_node: Sequence[int]) -> list[str]:
    nodes = [f"--nodes={len(per_node)}", f"--ntasks={sum(per_node)}"]
    options = ["--label", *nodes, f"--ntasks-per-node={max(per_node)}", "--kill-on-bad-exit=1"]
    meeting = ["env", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"]
    if len(per_node) > 1:
        meeting = []  # 127.0.0.1 is a different machine on each node
    return ["srun", *options, *meeting, sys.executable, *program]
