"""The rows of the fault matrix that need a real Slurm: a job is told to stop, cancelled, broken, or loses its node."""

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil
from real import LIMIT, until

from ddp_helpers import ROOT, jobs
from ddp_helpers.jobs.queue import run_slurm
from ddp_helpers.launch.processes import marked_processes
from ddp_helpers.rank import scripts
from faults.matrix import NAME, TWO_EPOCHS, events, weights

# A job's program that arms one of its ranks and becomes the script.
ARMED = """
import os, runpy, sys
sys.path[:0] = [{tests!r}, {root!r}]
from faults.inject import inject
if os.environ["SLURM_PROCID"] == "1":
    inject("exit 7", "step", 5, "harm.time")
runpy.run_path("{name}.py", run_name="__main__")
"""


class Submitted:
    """A resumable job on the course's cluster, in a folder of its own."""

    def __init__(self, matrix, name, nodes=2, program=NAME, site="local", **job):
        self.folder = matrix.fresh(f"job_{name}")
        self.run = self.folder / "run"
        scripts.write_script(NAME, self.run / f"{NAME}.py")
        text = ARMED.format(tests=str(ROOT / "tests"), root=str(ROOT), name=NAME)
        (self.run / "armed.py").write_text(text)
        flags = ("--data", str(matrix.data), "--run-dir", "{run_dir}", "--timeout", str(LIMIT), *TWO_EPOCHS)
        shape = {"nodes": nodes, "ranks_per_node": 2 // nodes, "requeue": True} | job
        job = jobs.Job(name, (f"{program}.py", *flags), **shape)
        jobs.write_job(job, jobs.Site.load(site), self.run)
        self.number = jobs.submit(self.run)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.state().active:
            jobs.cancel(self.number)

    def state(self):
        return jobs.states_of_job(self.number)[0]

    def processes(self):
        """All processes of the job on this machine, which is all its nodes."""
        return marked_processes(self.number, "SLURM_JOB_ID")

    def reaches(self, step):
        """Wait until it has saved at this step."""
        until(lambda: any(event.get("step", 0) >= step for event in events(self.folder)), f"step {step}")

    def goes_on(self):
        """Wait until it is back in the queue, have it start, and wait for its end."""
        until(lambda: self.state().state == "PENDING", "requeued")
        time.sleep(2)  # a node refuses a job that it has ended within the same second
        jobs.start_now(self.number)
        until(lambda: not self.state().active, "the end")
        assert self.state().state == "COMPLETED", self.log()

    def log(self):
        return (self.run / f"slurm-{self.number}.log").read_text(errors="replace")


def told(matrix, launcher):
    """Requeued once; both attempts in one log; the weights are those of a run that nobody told."""
    with Submitted(matrix, f"told-{launcher}", launcher=launcher) as job:
        job.reaches(5)
        done = run_slurm("scancel", "-s", "USR2", job.number)
        assert done.returncode == 0, done.stderr
        job.goes_on()
        assert weights(job.folder) == matrix.golden(), "the requeued run differs"
        told = [event for event in events(job.folder) if event["event"] != "saved"]
        assert [event["event"] for event in told] == ["started", "preempted", "started", "done"], told
        assert all(words in job.log() for words in ("stopped by SIGUSR2", "is requeued")), job.log()
        return told[2]["time"] - told[1]["time"]


def cancelled(matrix):
    """No process of the job is left."""
    with Submitted(matrix, "cancelled") as job:
        job.reaches(5)
        assert job.processes(), "the job's processes are not found, so that none is left proves nothing"
        begin = time.time()
        jobs.cancel(job.number)
        until(lambda: not job.processes(), "no process of the job left")
        until(lambda: job.state().state == "CANCELLED", "cancelled")
        return time.time() - begin


def exits(matrix):
    """A task that ends with 7 takes the job with it."""
    with Submitted(matrix, "exits", program="armed", requeue=False) as job:
        note = job.run / "harm.time"
        until(lambda: note.exists() and note.read_text(), "the harm")
        until(lambda: job.state().state == "FAILED", "FAILED")
        return time.time() - float(note.read_text())


def node_killed(matrix):
    """A node dies with all on it: the job is requeued onto another, and ends with the same weights."""
    with Submitted(matrix, "node", nodes=1) as job:
        job.reaches(5)
        node, begin = job.state().nodes, time.time()
        doomed = [process for process in psutil.process_iter() if is_of(process, node, job.number)] + job.processes()
        for process in doomed:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            until(lambda: job.state().state == "PENDING", "requeued")
            seconds = time.time() - begin
            job.goes_on()
        finally:
            up = subprocess.run([ROOT / "slurm" / "cluster", "up"], capture_output=True, check=False)
        assert up.returncode == 0, up.stderr
        assert job.state().nodes != node, f"{job.state().nodes} again"
        assert weights(job.folder) == matrix.golden(), "the requeued run differs"
        return seconds


def is_of(process, node, number):
    """Whether it is our node's slurmd, or a stepd of the job there: of this user, and of this cluster's folder."""
    state = Path(os.environ["SLURM_CONF"]).parent
    try:
        words, mine = process.cmdline(), process.uids().real == os.getuid()
        slurmd = str(state / f"{node}.log") in words and words[0].endswith("slurmd")
        stepd = " ".join(words).startswith(f"slurmstepd: [{number}.") and Path(process.cwd()).is_relative_to(state)
    except psutil.Error:
        return False
    return mine and (slurmd or stepd)


SLURM_ROWS = [
    *(
        ("Slurm scancel -s USR2", f"mid-epoch, {launcher}", partial(told, launcher=launcher))
        for launcher in ("srun", "torchrun")
    ),
    ("Slurm scancel", "step", cancelled),
    ("Slurm task exits 7", "step", exits),
    ("Slurm node killed", "mid-epoch", node_killed),
]
