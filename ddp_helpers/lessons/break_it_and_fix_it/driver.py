"""The runs that notebooks 10 and 10b examine: a job that hangs, and torchrun with its ranks.

The notebooks' kernel calls it; the processes that it starts run on this machine, or as a Slurm job.
With `gpus` torchrun's ranks see simulated GPUs, so NCCL's own messages appear without a GPU.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddp_helpers.jobs.queue import available, cancel, send, states_of_job
from ddp_helpers.jobs.site import Site
from ddp_helpers.launch.launchers import clean_environment, free_port
from ddp_helpers.launch.screen import coloured_line, shorten_paths
from ddp_helpers.lessons.run_script import LINE_WIDTH, STAMP
from ddp_helpers.lessons.simulated import on_simulated_gpus

_RANKS = 2
# As in 07's job file, the training is the second step, JOB.1.
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

    Commands in the notebook find it by two variables: JOB, the job's number, which is empty
    without Slurm, and PIDS, the processes that were started here.
    """

    def __init__(self, script: Path, site: str) -> None:
        """Start the script in its folder; each rank writes into rank0.log or rank1.log there."""
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for py-spy
        os.environ["CLICOLOR_FORCE"] = "0"
        self._job, self._processes = "", []
        if available():
            file = script.with_suffix(".sbatch")
            file.write_text(_JOB_FILE)
            shape = [f"--nodes={_RANKS}", "--ntasks-per-node=1", "--time=20"]
            names = [f"--job-name={script.name}", "--output=stuck.log"]
            self._job = send(file, *shape, *names, *Site.load(site).admission)
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
            return states_of_job(self._job)[0].active
        return all(process.poll() is None for process in self._processes)

    def end(self) -> str:
        """End the job, or the processes, and return how they ended."""
        if self._job:
            cancel(self._job)
            self.wait_until(lambda: False)
            return states_of_job(self._job)[0].state
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


def start_torchrun(
    *arguments: str, folder: Path, gpus: int = 0, **env: str
) -> subprocess.Popen[str]:
    """Start a script on two ranks in a folder: torchrun's flags, and last the script's name.

    gpus: the number of simulated GPUs that the ranks see, even next to real ones; 0: the machine's
    own. The output is in its stdout and stderr.
    """
    # Static, as `launchers` does it: a neighbour could write to what --standalone unpickles.
    meeting = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1"]
    meeting.append(f"--master-port={free_port()}")
    command = [sys.executable, "-m", "torch.distributed.run", *meeting]
    command += [f"--nproc-per-node={_RANKS}", *arguments]
    inherited = clean_environment()
    if gpus:
        command = [*on_simulated_gpus(gpus), *command]
        inherited.pop("CUDA_VISIBLE_DEVICES", None)  # it names real ones
    return subprocess.Popen(
        command,
        cwd=folder,
        env=inherited | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_RANK = re.compile(r"\[rank(\d+)\]:")
_GROUP = re.compile(r"^\[PG (ID \d+ )?[^]]*Rank \d+\] +")  # NCCL's
_LIMIT = 180.0  # seconds that a run on simulated GPUs may take
_TRACE = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]


def told(
    run: subprocess.Popen[str],
    *beginnings: str,
    recorder: Path | None = None,
    log: Path | None = None,
) -> None:
    """Wait for the end of what `start_torchrun` has started, and print its telling lines.

    They are those with one of these beginnings, without the time, torch's file and the group.
    recorder: a folder with the ranks' flight recorders, which torchfrtrace compares.
    log: a file for all output of the ranks and of torchrun.
    A run that takes too long is ended.
    Raises LookupError, with the log, if one of the beginnings is in no line.
    """
    try:
        text = "".join(run.communicate(timeout=_LIMIT))
    except subprocess.TimeoutExpired:
        run.terminate()  # it is passed on to torchrun, which ends its ranks
        text = "".join(run.communicate())
    if log:
        log.write_text(text)
    if recorder:
        words = [*_TRACE, str(recorder), "--prefix", "fr_rank_", "--allow-incomplete-ranks"]
        trace = subprocess.run(words, capture_output=True, text=True, check=False)
        text += "torchfrtrace prints:\n" + trace.stdout + trace.stderr
        beginnings += ("torchfrtrace prints:",)
    lines = dict.fromkeys(map(_cleaned, text.splitlines()))
    for beginning in beginnings:
        if not any(said.startswith(beginning) for _, said in lines):
            raise LookupError(f"no line begins with {beginning!r}:\n{text}")
    for label, said in lines:
        if said.startswith(beginnings):
            shown = said if len(said) <= LINE_WIDTH else f"{said[:LINE_WIDTH]} …"
            print(" ", coloured_line(label, shown))


def _cleaned(line: str) -> tuple[str, str]:
    """Return the label of a line ("" if it is no rank's), and its message."""
    rank = _RANK.match(line)
    text = _GROUP.sub("", STAMP.sub("", line))
    said = re.sub(r" \(pid: \d+\)", "", shorten_paths(text.strip()))
    return f"rank {rank[1]}" if rank else "", said
