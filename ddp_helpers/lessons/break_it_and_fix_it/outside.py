"""What notebooks 10 and 10b look at from outside: a job that hangs, and torchrun with its ranks.

The notebooks' kernel calls it; the processes that it starts run on this machine, or as a Slurm job.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddp_helpers import jobs
from ddp_helpers.jobs.queue import run_slurm
from ddp_helpers.launch.launchers import clean_environment, free_port

_RANKS = 2


class HangingJob:
    """A script that hangs on two ranks: a Slurm job if a Slurm answers, else two processes here.

    Commands that the notebook types find it by two variables: JOB, the job's number, which is empty
    without Slurm, and PIDS, the processes that were started here.
    """

    def __init__(self, script: Path, site: str) -> None:
        """Start the script in its folder; each rank writes into rank0.log or rank1.log there."""
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for py-spy
        os.environ["CLICOLOR_FORCE"] = "0"
        env = clean_environment() | {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(_RANKS)}
        env |= {"MASTER_PORT": str(free_port())}
        line = f"export RANK=${{RANK:-$SLURM_PROCID}}; exec python {script.name} &> rank$RANK.log"
        self._name = f"stuck-{os.getpid()}"
        self._on_slurm = jobs.available()
        starts = [["env", f"RANK={rank}"] for rank in range(_RANKS)]
        if self._on_slurm:
            flags = [f"--job-name={self._name}", "--nodes=1", f"--ntasks={_RANKS}", "--time=20"]
            starts = [["srun", *flags, "--kill-on-bad-exit=1", *jobs.Site.load(site).admission]]
        with (script.parent / "srun.log").open("w") as log:
            self._processes = [
                subprocess.Popen(
                    [*start, "bash", "-c", line],
                    cwd=script.parent,
                    env=env,
                    stderr=log,
                    start_new_session=True,
                )
                for start in starts
            ]

    def wait_until(self, happened: Callable[[], object]) -> None:
        """Wait for something that the ranks do, as long as they live; then set JOB and PIDS."""
        while not happened() and all(process.poll() is None for process in self._processes):
            time.sleep(0.1)
        os.environ["PIDS"] = " ".join(str(process.pid) for process in self._processes)
        query = ["--me", f"--name={self._name}", "--noheader", "--format=%A"]
        number = run_slurm("squeue", *query).stdout.strip() if self._on_slurm else ""
        os.environ["JOB"] = number

    def end(self) -> list[int]:
        """End the job, and return the exit statuses of what was started here."""
        if self._on_slurm:
            run_slurm("scancel", os.environ["JOB"])
        else:
            for process in self._processes:
                os.killpg(process.pid, signal.SIGKILL)  # with the server, which outlives its rank
        return [process.wait() for process in self._processes]


def start_torchrun(*arguments: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """Start a script on two ranks in a folder: torchrun's flags, and last the script's name.

    What it writes can be read from its stdout and stderr.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=localhost", f"--nproc-per-node={_RANKS}", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=clean_environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
