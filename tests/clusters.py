"""A Slurm of a test's own, by `slurm/cluster` in a new folder; and programs that stand in for a cluster's."""

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from real import LIMIT, fail_in_ci, until

SCRIPT = Path(__file__).parent.parent / "slurm" / "cluster"
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def need_slurm():
    """Real daemons, on a machine that belongs to no other cluster."""
    if not all(shutil.which(name, path=SBIN) for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch")):
        fail_in_ci("no Slurm on this machine: apt-get install slurmctld slurmd slurm-client munge")
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")


@dataclass
class Cluster:
    """The script, in a folder of its own, run by some user."""

    home: Path
    prefix: tuple = ()

    @property
    def state(self) -> Path:
        return self.home / "ddp-course"

    def env(self, **env):
        # Not the HOME of whoever runs the tests, and no CI, which changes what the script does without Slurm.
        mine = {name: value for name, value in os.environ.items() if name not in ("CI", "SLURM_CONF")}
        return {**mine, "HOME": str(self.home), "XDG_STATE_HOME": str(self.home), **env}

    def start(self, *command):
        """A command, as this cluster's user, that reads a line and goes on until it comes."""
        command = [*self.prefix, *map(str, command)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.env(), cwd=self.home, **pipes)

    def run(self, *command, **env):
        """Any command, as this cluster's user."""
        command, env = [*self.prefix, *map(str, command)], self.env(**env)
        options = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False, "cwd": self.home}
        return subprocess.run(command, env=env, **options)

    def __call__(self, *args, **env):
        """`slurm/cluster ARGS`; the copy can be read by any user, wherever the checkout lies."""
        return self.run(self.home / "cluster", *args, **env)

    def up(self) -> "Cluster":
        ended = self("up")
        assert ended.returncode == 0, ended.stderr
        return self

    def slurm(self, *command):
        """What a Slurm command prints, given this cluster's settings."""
        ended = self.run(*command, SLURM_CONF=str(self.state / "slurm.conf"))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def submit(self, *args) -> int:
        return int(self.slurm("sbatch", "--parsable", f"--output={self.home}/%j.out", *args))

    def submit_saved(self, body) -> int:
        """A job that runs, and that the controller has on disk: a crash in the first 5 s would make it forget it."""
        job = self.submit(f"--wrap={body}")
        until(lambda: "sleep" in self.processes().values(), "the job runs")
        # A word of ours in what the controller saves: it may have saved the running job before we look, and then
        # saves nothing for five minutes.
        self.slurm("scontrol", "update", f"JobId={job}", f"Comment=runs-{job}")
        until(lambda: self.has_saved(f"runs-{job}"), "the controller saves it")
        return job

    def has_saved(self, word) -> bool:
        """Whether a word is in the controller's file of jobs, which is away for a moment while it is replaced."""
        with suppress(FileNotFoundError):
            return word.encode() in (self.state / "slurmctld" / "job_state").read_bytes()
        return False

    def processes(self) -> dict[int, str]:
        """Every living process that has our folder in its command line, environment, or as its folder."""
        processes = {}
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), *process.environ().values(), process.cwd()]
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.home) in str(word) for word in words):
                    processes[process.pid] = process.name()
            except psutil.Error:
                pass
        return processes

    def kill(self, *names):
        """A crash: these daemons end without a chance to tidy up."""
        for pid, name in self.processes().items():
            if name in names:
                os.kill(pid, signal.SIGKILL)
        until(lambda: not set(names) & set(self.processes().values()), "they are gone")


def make_cluster(prefix=()):
    """A cluster that is down, under a path short enough for sockets."""
    home = Path(tempfile.mkdtemp(prefix="ddp", dir="/tmp"))
    shutil.copy(SCRIPT, home / "cluster")
    if prefix:
        shutil.chown(home, 65534, 65534)
    return Cluster(home, prefix)


def remove(cluster):
    """Take it down, and leave nothing."""
    ended = cluster("down")
    left = cluster.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(cluster.home)
    assert (ended.returncode, left) == (0, {}), ended.stderr


def program(path, text):
    """Write a shell program that can be called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def our_python(path, env=""):
    """Write a program that is this Python: a site's `python` has no space, and the checkout's path may have one."""
    program(path, f'{env} exec {shlex.quote(sys.executable)} "$@"')
