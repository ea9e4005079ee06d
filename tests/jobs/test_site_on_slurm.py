"""What a site asks for, done by a real Slurm: its modules, its container, and where torchrun's ranks meet.

`module` is Lmod's or Environment Modules' own, and containers are Charliecloud's (ch-run), which needs no root. Two
things are not real here: Singularity, which Debian lacks, so that only its words are compared (test_site); and conda,
which no registry of pip's or Debian's has: a function stands in for it, unless CONDA_EXE names a real one.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import our_python, program
from real import LIMIT, fail_in_ci

from ddp_helpers import ROOT, RUNS
from ddp_helpers.jobs import Job, Site, collect, submit, watch, write_job
from ddp_helpers.jobs.files import log_of
from ddp_helpers.jobs.sweep import execute
from ddp_helpers.records import runs

HELLO = """
import os, pathlib, sys
env = os.environ.get
rank = env("RANK", env("SLURM_PROCID"))
print(f"rank {rank} meets at {env('MASTER_ADDR')}:{env('MASTER_PORT')}, in {env('INSIDE')}", flush=True)
print(f"CUDA_HOME={env('CUDA_HOME')} TORCH_HOME={env('TORCH_HOME')} OLD={env('OLD')}", flush=True)
"""
OURS = ("--partition=course", "--mem=100M")  # in the place of what a site asks its own Slurm for
IN_IMAGE = """bash -c 'source /ext3/env.sh && exec python "$@"' python"""
MODULES = re.compile(r"BASH_(FUNC_|ENV$)|_*(LMOD|LMFILES|MODULE|LOADEDMODULES)")  # the variables of a `module` command


@pytest.fixture
def log(cluster, tmp_path, capsys):
    """Run a small job at a site, and give its state and the lines of its log."""

    def run(site, **shape):
        folder = tmp_path / f"job at {site.name}"
        job = Job("hello", ("hello.py",), **{"nodes": 2, "ranks_per_node": 2} | shape)
        write_job(job, site, folder)
        (folder / "hello.py").write_text(HELLO)
        number = submit(folder)
        watch(folder)
        [record] = collect(folder)
        capsys.readouterr()
        return record.job["state"], log_of(folder, number)

    return run


@pytest.fixture
def environment(tmp_path):
    """The bin folder of an environment, as conda has them, whose Python says that it is the one."""
    bin_folder = tmp_path / "envs" / "torch-env" / "bin"
    our_python(bin_folder / "python", "INSIDE=environment")
    (bin_folder.parent / "conda-meta").mkdir()
    (bin_folder.parent / "conda-meta" / "history").touch()
    return bin_folder


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module file: jobs are submitted with the `module` command of a login shell, which finds these files."""
    shell = subprocess.run(["bash", "-lc", "env -0"], capture_output=True, text=True, check=True, timeout=LIMIT)
    variables = dict(line.split("=", 1) for line in shell.stdout.split("\0") if "=" in line)
    if "BASH_FUNC_module%%" not in variables:
        fail_in_ci("no `module` command on this machine: install environment-modules or lmod")
    for name in filter(MODULES.match, variables):
        monkeypatch.setenv(name, variables[name])
    monkeypatch.setenv("MODULEPATH", str(tmp_path / "modulefiles"))

    def write_module(name, text):
        path = tmp_path / "modulefiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#%Module1.0\n{text}\n")

    return write_module


@pytest.fixture
def conda(tmp_path, environment, monkeypatch):
    """A file for a shell that defines `conda`: the real one's where CONDA_EXE names it, else a function of ours."""
    path = tmp_path / "conda.sh"
    monkeypatch.setenv("CONDA_ENVS_PATH", str(environment.parent.parent))
    if real := os.environ.get("CONDA_EXE"):
        hook = [real, "shell.posix", "hook"]
        path.write_text(subprocess.run(hook, capture_output=True, text=True, check=True, timeout=LIMIT).stdout)
    else:
        path.write_text('conda() { [ "$1" = activate ] && PATH="$CONDA_ENVS_PATH/$2/bin:$PATH"; }\n')
    return path


@pytest.fixture
def started_in(tmp_path, monkeypatch):
    """Make an image, and give the words that start a program in it; only there is /ext3, with env.sh and a Python.

    It shows the machine's own system, so that it need not be copied, and besides what it is told to show.
    """
    if not shutil.which("ch-run"):
        fail_in_ci("no ch-run on this machine: install charliecloud-runtime")
    monkeypatch.setenv("USER", os.environ.get("USER", "learner"))  # ch-run wants to know
    root = tmp_path / "image"
    for name in ("dev", "proc", "sys", "tmp", "digits"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    our_python(root / "ext3" / "bin" / "python", "INSIDE=image")
    (root / "ext3" / "env.sh").write_text("PATH=/ext3/bin:$PATH\n")

    def words_for(*shown):
        for path in shown:
            (root / path[1:]).mkdir(parents=True, exist_ok=True)
        for name in ("passwd", "group"):  # ch-run wants to find them in the image
            (root / "etc" / name).touch()
        words = ["ch-run", *(f"--bind={path}" for path in sorted(shown)), '--cd="$PWD"', shlex.quote(str(root)), "--"]
        line = " ".join(words)
        started = subprocess.run(["bash", "-c", f"{line} true"], cwd="/", capture_output=True, text=True)
        if "can't init user+mount namespaces" in started.stderr:
            fail_in_ci(f"this machine lets nobody start a container without root: {started.stderr.strip()}")
        assert started.returncode == 0, started.stderr
        assert not Path("/ext3").exists(), "this machine has what only the image should have"
        return line

    return words_for


@pytest.fixture
def image(started_in, tmp_path):
    """The words that start a program in an image which shows all of this machine that a job may name."""
    paths = ("/usr", "/etc", sys.prefix, sys.base_prefix, ROOT, tmp_path)
    return started_in(*{f"/{Path(path).parts[1]}" for path in paths})


def test_a_file_that_set_up_sources_is_read_as_at_a_prompt_and_handed_to_the_ranks(log, tmp_path, monkeypatch):
    """Also where sbatch was told to export nothing."""
    file = tmp_path / "env.sh"
    file.write_text('declare -x CUDA_HOME="$CUDA_HOME[$#:$*]"\nexport TORCH_HOME="$OLD"\n')
    setup = ("export LONG='a b; $(touch x)'", 'export OLD="${LONG:?}/x:$NONE"', f"source {file}")
    setup += (f'source {file} gpu "$OLD"',)
    read = "CUDA_HOME=[0:][2:gpu a b; $(touch x)/x:] TORCH_HOME=a b; $(touch x)/x: OLD=a b; $(touch x)/x:"
    state, lines = log(Site("all", sbatch=(*OURS, "--export=NONE"), setup=setup))
    assert state == "COMPLETED" and sum(read in line for line in lines) == 4, lines
    state, lines = log(Site("unset", sbatch=OURS, setup=setup[1:]))
    assert state == "FAILED" and "LONG: parameter null or not set" in lines[-1]
    assert not any("meets at" in line for line in lines), "a rank ran with half of a set-up"


def test_dellas_lines_do_their_work_and_one_that_fails_ends_the_job_with_its_name(log, module, conda, environment):
    module("anaconda3/2024.6", f'puts stdout "source {conda};"')
    site = replace(Site.load("della"), sbatch=OURS)
    state, lines = log(site)
    assert state == "COMPLETED" and sum("in environment" in line for line in lines) == 4, lines
    setup = tuple(line.replace("anaconda3/2024.6", "nosuchmodule/1") for line in site.setup)
    state, lines = log(replace(site, name="without-the-module", setup=setup))
    assert state == "FAILED" and lines[-1].endswith("module load nosuchmodule/1")
    assert any("nosuchmodule/1" in line for line in lines[:-1]), "the module command did not say so itself"
    assert not any("meets at" in line for line in lines)


def test_the_classrooms_lines_do_their_work(log, module, environment, monkeypatch):
    module("python/3.12", f"prepend-path PATH {environment}")
    module("cuda/13.0", "setenv CUDA_HOME /cuda")
    module("old/1", "setenv OLD yes")
    monkeypatch.setenv("SCRATCH", "/scratch")
    setup = ("module load old/1", *Site.load("classroom").setup)
    site = replace(Site.load("classroom"), sbatch=OURS, setup=setup)
    state, lines = log(site)
    assert state == "COMPLETED" and sum("in environment" in line for line in lines) == 4, lines
    assert sum("CUDA_HOME=/cuda TORCH_HOME=/scratch/torch OLD=None" in line for line in lines) == 4, lines
    state, lines = log(replace(site, name="no-purge", setup=("module load old/1", *site.setup[2:])))
    assert state == "COMPLETED" and sum("OLD=yes" in line for line in lines) == 4, lines


def test_greenes_ranks_run_in_the_image_and_meet_at_the_address_that_the_log_prints(log, module, image):
    greene = Site.load("greene")
    greene = replace(greene, container=image, sbatch=OURS, setup=(*greene.setup, "export OLD=handed-on"))
    for launcher in ("srun", "torchrun"):
        state, lines = log(replace(greene, name=launcher), launcher=launcher)
        printed = next(line.rpartition(" ")[2] for line in lines if line.startswith("job "))
        assert state == "COMPLETED" and sum(f"meets at {printed}, in image" in line for line in lines) == 4, lines
        assert sum("OLD=handed-on" in line for line in lines) == 4, lines
    state, lines = log(replace(greene, name="without-the-image", container=""))
    assert state == "FAILED" and any("/ext3/env.sh: No such file" in line for line in lines), lines
    assert not any("in image" in line for line in lines)


def test_07s_job_trains_in_a_container_on_data_that_only_the_image_has_and_its_record_comes_back(
    cluster, image, digits, tmp_path
):
    container = image.replace("ch-run", f"ch-run --bind={digits}:/digits")
    assert not Path("/digits").exists(), "this machine has what only the image should have"
    site, folder = tmp_path / "container.toml", RUNS / f"container-{time.time_ns()}"
    values = {"nodes": 2, "gpus_per_node": 1, "data": "/digits", "site": str(site), "run": folder.name}
    site.write_text(
        'sbatch = ["--partition=course"]\nscript_args = ["--no-cuda"]\n'
        f"container = {json.dumps(container)}\npython = {json.dumps(IN_IMAGE)}\n"
    )
    try:
        execute(ROOT / "slurm" / "job.ipynb", tmp_path / "job.ipynb", **values)
        run = runs.read_run(folder)
        assert (run.state, run.job["state"], run.problems) == ("done", "COMPLETED", [])
        assert (run.env["launcher"], run.env["world_size"], run.nodes) == ("slurm", 2, 2)
        assert run.env["train_set"] == 512 and [epoch["epoch"] for epoch in run.epochs] == [1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


RECORD = """
import pathlib, sys
pathlib.Path(sys.argv[1], f"value-{sys.argv[2]}").touch()
"""
MOUNTS = {"all runs": '--bind="$runs"', "one folder": '--bind "$PWD"'}


@pytest.mark.parametrize("mounts", MOUNTS)
def test_an_arrays_records_come_out_of_the_container_or_a_line_says_what_to_mount(
    mounts, cluster, started_in, tmp_path
):
    above = RUNS / f"container-{time.time_ns()}"
    words = started_in(*{"/usr", "/etc", sys.base_prefix})  # not the checkout's environment
    image = tmp_path / "image"
    program(image / "ext3" / "bin" / "python", f'exec {shlex.quote(sys._base_executable)} "$@"')
    (image / str(above)[1:] / "sweep").mkdir(parents=True)
    container = words.replace("ch-run", f"ch-run --private-tmp {MOUNTS[mounts]}")
    site = Site("container", sbatch=OURS, python=IN_IMAGE, container=container)
    job = Job("sweep", ("record.py", "{run_dir}", "{array}"), array=("a", "b"))
    try:
        write_job(job, site, above / "sweep", RECORD)
        number = submit(above / "sweep")
        watch(above / "sweep")
        states = [task.job["state"] for task in collect(above / "sweep")]
        log = [line for path in (above / "sweep").glob("slurm-*.log") for line in path.read_text().splitlines()]
        records = sorted(path.name for path in above.glob("sweep-*/value-*"))
        if mounts == "all runs":
            assert (states, records) == (["COMPLETED"] * 2, ["value-a", "value-b"]), log
        else:
            assert (states, records) == (["FAILED"] * 2, []), f"job {number}"
            assert sum("mount the folder above it" in line for line in log) == 2, log
    finally:
        shutil.rmtree(above, ignore_errors=True)
