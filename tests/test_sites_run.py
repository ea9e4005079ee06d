"""What a site asks for, done by a real Slurm: its set-up, its container, and where torchrun's ranks meet."""

import shlex
import stat
import sys

import pytest

from ddp_helpers.notebook.slurm import Job, Site, collect, submit, watch, write
from ddp_helpers.notebook.slurm.run import log_of

HELLO = """
import os, pathlib, sys
env = os.environ.get
rank = env("RANK", env("SLURM_PROCID"))
print(f"rank {rank} meets at {env('MASTER_ADDR')}:{env('MASTER_PORT')}, in {env('INSIDE')}", flush=True)
"""


@pytest.fixture
def log(cluster, tmp_path, capsys):
    """Run a small job at a site, and give its state and the lines of its log."""

    def run(site, **shape):
        folder = tmp_path / "job"
        job = Job("hello", ("hello.py",), **{"nodes": 2, "tasks_per_node": 2} | shape)
        write(job, site, folder)
        (folder / "hello.py").write_text(HELLO)
        number = submit(folder)
        watch(folder)
        [found] = collect(folder)
        capsys.readouterr()
        return found.job["state"], log_of(folder, number)

    return run


def program(path, text):
    """Write a shell program that can be called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def our_python(path, env=""):
    """Write a program that is this Python: a site's `python` has no space, and the checkout's path may have one."""
    program(path, f'{env} exec {shlex.quote(sys.executable)} "$@"')


@pytest.fixture
def environment(tmp_path):
    """The folder of an environment whose Python says that it is the one."""
    our_python(tmp_path / "env" / "bin" / "python", "INSIDE=environment")
    return tmp_path / "env" / "bin"


def test_a_line_of_set_up_that_fails_ends_the_job_with_its_name(log):
    state, lines = log(Site("broken", partition="course", setup=("module load nosuchmodule/1",)))
    assert state == "FAILED" and lines[-1] == "set-up failed: module load nosuchmodule/1"
    assert not any("meets at" in said for said in lines)


def test_dellas_lines_do_their_work(log, environment, monkeypatch):
    monkeypatch.setenv("BASH_FUNC_module%%", '() { echo "module $*"; }')
    monkeypatch.setenv("BASH_FUNC_conda%%", f'() {{ echo "conda $*"; PATH={environment}:$PATH; }}')
    state, lines = log(Site.load("della").but(memory="100M"))
    assert state == "COMPLETED", lines
    assert lines[:3] == ["module purge", "module load anaconda3/2024.6", "conda activate torch-env"]
    assert sum("in environment" in line for line in lines) == 4


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_greenes_ranks_run_in_the_image_and_meet_at_the_address_that_the_log_prints(
    launcher, log, environment, tmp_path, monkeypatch
):
    program(tmp_path / "bin" / "singularity", '[ "$1 $2 $3" = "exec --nv --overlay" ] && shift 5 && exec "$@"')
    (tmp_path / "env.sh").write_text(f"PATH={environment}:$PATH\n")
    monkeypatch.setenv("BASH_FUNC_module%%", "() { :; }")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    state, lines = log(Site.load("greene").but(memory="100M", source=str(tmp_path / "env.sh")), launcher=launcher)
    printed = next(line.rpartition(" ")[2] for line in lines if line.startswith("job "))
    assert state == "COMPLETED" and sum(f"meets at {printed}, in environment" in line for line in lines) == 4, lines
