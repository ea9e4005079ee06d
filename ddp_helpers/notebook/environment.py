"""The environment of what is started from here, without the job or the rank that this process may itself be."""

import os
import re
from pathlib import Path

INHERITED = re.compile(
    r"(SLURMD?(?!_(ACCOUNT|PARTITION|QOS|RESERVATION)$)|SBATCH_(CPU|MEM)|SRUN|PMIX?|PMI2|OMPI|TORCHELASTIC|MASTER|GROUP|ROLE)_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)


def clean() -> dict[str, str]:
    """This process's environment without any launcher's variables, and with the course's own Slurm if it is up.

    What people tell sbatch by SBATCH_ACCOUNT, srun by SLURM_ACCOUNT, and the like stays: no job sets these itself.
    """
    env = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not INHERITED.match(name)}
    state = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ddp-course"
    site = Path("/etc/slurm/slurm.conf").exists()
    if "SLURM_CONF" not in env and not site and (state / "slurm.conf").is_file():
        env["SLURM_CONF"] = str(state / "slurm.conf")
    return env
