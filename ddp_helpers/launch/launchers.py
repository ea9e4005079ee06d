"""Command lines and environments with which torchrun, mpirun, srun or Python start the ranks."""

import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_helpers.rank.launchers import LAUNCHERS, OLDER_NCCL, STARTS, cpus_of_rank

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks that are all on this machine talk over what no other machine can reach.
HERE = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
# torchrun, whose meeting place listens on this machine alone. By its path, since ddp_helpers need not be installed;
# -P, so that the modules beside it are not taken for others of these names.
TORCHRUN = [sys.executable, "-P", str(Path(__file__).parents[1] / "rank" / "meeting.py")]

# What launchers leave to their ranks: whatever a rank knows itself or its start by, and all else of these families.
KNOWN_BY = {name for table in (LAUNCHERS, STARTS) for names in table.values() for name in names}
INHERITED = re.compile(
    rf"({'|'.join(sorted(KNOWN_BY))})$|(PMIX?|PMI2|OMPI|PALS|TORCHELASTIC|MASTER|GROUP|ROLE)_"
    r"|(SLURMD?(?!_(ACCOUNT|PARTITION|QOS|RESERVATION)$)|SBATCH_(CPU|MEM)|SRUN)_"
)


def clean() -> dict[str, str]:
    """This process's environment without any launcher's variables, and with the course's own Slurm if it is up.

    What people tell sbatch by SBATCH_ACCOUNT, srun by SLURM_ACCOUNT, and the like stays: no job sets these itself.
    """
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not INHERITED.match(name)}
    # Jupyter's kernel sets FORCE_COLOR, and from 3.13 on Python then colours tracebacks, letter by letter.
    env["PYTHON_COLORS"] = "0"
    state = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ddp-course"
    site = Path("/etc/slurm/slurm.conf").exists()
    if "SLURM_CONF" not in env and not site and (state / "slurm.conf").is_file():
        env["SLURM_CONF"] = str(state / "slurm.conf")
    return env


# How each launcher marks a rank's line; what bears no mark is the launcher's own talk.
MARKS = {
    "torchrun": r"\[rank(\d+)\]:(.*)",
    "mpirun": r"\[\d+,(\d+)\]<\w+>: ?(.*)",  # Open MPI 5 has a space there, Open MPI 4 has none
    "srun": r" *(\d+): (.*)",
    "python": r"()(.*)",
}


def commands(launcher: str, program: list[str], per_node: Sequence[int], logs: str) -> list[list[str]]:
    """The command lines that start the ranks: one, or with torchrun one for each node."""
    ranks = sum(per_node)
    if launcher != "python" and launcher != "torchrun" and not shutil.which(launcher):
        raise FileNotFoundError(f"{launcher} is not on this machine: install it, or use launcher='torchrun'")
    if launcher == "mpirun":
        # Unbuffered, it would mark each piece of a line.
        options = ["--tag-output", "--oversubscribe", "--bind-to", "none", "-x", "PYTHONUNBUFFERED="]
        options += ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
        return [["mpirun", *options, "-n", str(ranks), sys.executable, *program]]
    if launcher == "srun":
        shape = [f"--nodes={len(per_node)}", f"--ntasks={ranks}", f"--ntasks-per-node={max(per_node)}"]
        meet = ["env", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"] if len(per_node) == 1 else []
        return [["srun", "--label", *shape, "--kill-on-bad-exit=1", *meet, sys.executable, *program]]
    if launcher == "python":
        return [[sys.executable, *program]]
    torchrun = [*TORCHRUN, "--role=rank", "--tee=3", f"--log-dir={logs}"]
    if len(per_node) == 1:
        # Without an address, torchrun meets at this machine's own name, which may stand for no address: it would wait.
        meet = ["--standalone", "--local-addr=localhost"]
        return [[*torchrun, *meet, f"--nproc-per-node={ranks}", *program]]
    meet = [f"--nnodes={len(per_node)}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [[*torchrun, *meet, f"--node-rank={i}", f"--nproc-per-node={n}", *program] for i, n in enumerate(per_node)]


def free_port() -> int:
    """A port that is free now, and none of those from 32768 on, which Linux gives to whoever asks for any port.

    Rank 0 listens on it seconds later, and meanwhile others start and ask for many.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := 20_000 + secrets.randbelow(12_768)))
            return port


def enough_gpus(ranks: int) -> bool:
    """Whether this machine has a GPU for each of so many ranks, or one that NCCL lets them share."""
    import torch  # here, since it takes seconds, and a notebook that hands its job to Slurm needs none of it

    if (gpus := torch.cuda.device_count()) != 1:
        return ranks <= gpus
    # Since NCCL 2.30 (torch 2.14), where this variable asks for it; it was not tried here.
    asked = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return ranks == 1 or (asked and torch.cuda.nccl.version() >= (2, 30))


def environment(per_node: Sequence[int], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks: no rank of our own, nothing buffered, CPUs shared, GPUs where there are enough."""
    env = clean() | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, cpus_of_rank() // sum(per_node)))}
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]:"
    env.setdefault(*OLDER_NCCL)
    if len(per_node) > 1 or not enough_gpus(sum(per_node)):  # or several pretended nodes
        env["CUDA_VISIBLE_DEVICES"] = ""
    if os.geteuid() == 0:  # as in a container; mpirun refuses root otherwise
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env | dict(extra)
