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
from ddp_helpers.jobs.queue import send
from ddp_helpers.launch.launchers import clean_environment, free_port

_RANKS = 2
# As in 07's job file, the training is the second step: JOB.1, and not JOB.0.
_JOB_FILE = r"""#!/bin/bash
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_ADDR=$(scontrol show node "$first" --oneliner | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) WORLD_SIZE=$SLURM_NTASKS
srun --label printenv SLURMD_NODENAME
srun --kill-on-bad-exit=1 --output=rank%t.log \
    bash -c 'RANK=$SLURM_PROCID exec python "$SLURM_JOB_NAME"'
"""


class HangingJob:
    """A script that hangs on two ranks: a job of two nodes if a Slurm answers, else two processes.

    Commands that the notebook types find it by two variables: JOB, the job's number, which is empty
    without Slurm, and PIDS, the processes that were started here.
    """

    def __init__(self, script: Path, site: str) -> None:
        """Start the script in its folder; each rank writes into rank0.log or rank1.log there."""
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for py-spy
        os.environ["CLICOLOR_FORCE"] = "0"
        self._job, self._processes = "", []
        if jobs.available():
            file = script.with_suffix(".sbatch")
            file.write_text(_JOB_FILE)
            shape = [f"--nodes={_RANKS}", "--ntasks-per-node=1", "--time=20"]
            names = [f"--job-name={script.name}", "--output=stuck.log"]
            self._job = send(file, *shape, *names, *jobs.Site.load(site).admission)
        else:
            port = str(free_port())
            self._processes = [_start_rank(script, rank, port) for rank in range(_RANKS)]
        os.environ["JOB"] = self._job
        os.environ["PIDS"] = " ".join(str(process.pid) for process in self._processes)

    def wait_until(self, happened: Callable[[], object]) -> None:
        """Wait for something that the ranks do, as long as they live."""
        while not happened() and self._is_there():
            time.sleep(0.1)

    def _is_there(self) -> bool:
        """Whether the job, or each of the two processes, has not ended."""
        if self._job:
            return jobs.states_of_job(self._job)[0].active
        return all(process.poll() is None for process in self._processes)

    def end(self) -> str:
        """End the job, or the processes, and return how they ended."""
        if self._job:
            jobs.cancel(self._job)
            self.wait_until(lambda: False)
            return jobs.states_of_job(self._job)[0].state
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)  # with the server, which outlives its rank
            process.wait()
        return "killed"


def _start_rank(script: Path, rank: int, port: str) -> subprocess.Popen[bytes]:
    """Start one of two ranks on this machine, which writes into rank0.log or rank1.log."""
    env = clean_environment() | {"RANK": str(rank), "WORLD_SIZE": str(_RANKS)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = ["python", script.name]
    with (script.parent / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            command, cwd=script.parent, env=env, stdout=log, stderr=log, start_new_session=True
        )


def start_torchrun(*arguments: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """Start a script on two ranks in a folder: torchrun's flags, and last the script's name.

    What it writes can be read from its stdout and stderr.
    """
    # Static, as `launchers` does it: a neighbour could write to what --standalone unpickles.
    meeting = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1"]
    meeting.append(f"--master-port={free_port()}")
    command = [sys.executable, "-m", "torch.distributed.run", *meeting]
    command += [f"--nproc-per-node={_RANKS}", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=clean_environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
