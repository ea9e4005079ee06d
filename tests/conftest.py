"""What every test starts from: no launcher's variables around it, and a small digits set."""

import os
import re
import shutil

import jupyter_client
import pytest
import torch
from hypothesis import HealthCheck, settings
from real import THOROUGH, fail_in_ci

from ddp_helpers.jobs import available
from ddp_helpers.jobs.queue import run_slurm
from ddp_helpers.launch.kernels import KernelOnFiles
from ddp_helpers.launch.launchers import INHERITED
from ddp_helpers.rank.digits import write_digits

# The same inputs every time, but in `make test-all`; a slow machine is no failure.
settings.register_profile(
    "course", derandomize=not THOROUGH, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("course")

torch.set_num_threads(1)  # three processes test at once: on two CPUs, threads that wait for one another would spin
os.environ["GOMP_SPINCOUNT"] = "0"  # nor do those of a notebook's kernel, and of the ranks that it starts

jupyter_client.AsyncKernelManager = KernelOnFiles  # which nbclient takes, and so nbmake: it can be told of no other

# Whoever needs these has the course's Slurm and runs/ to itself, and so has a notebook that uses Slurm, and a file that
# is marked so. The other notebooks are a second group.
ALONE = {"cluster", "browser"}
USES_SLURM = re.compile(r"jobs\.available|jobs\.watch|%%slurm")
GROUPS = {"alone": 0, "notebooks": 1}  # the longest groups first
OF_A_JOB = re.compile(r"SLURM_|CUDA_VISIBLE_|OMP_|DDP_")  # beside what launchers set


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Sort the tests into groups, for each of which pytest-xdist takes one process: GROUPS, and one a file."""
    for item in items:
        group = item.path.stem
        if item.path.suffix == ".ipynb":
            group = "alone" if USES_SLURM.search(item.path.read_text()) else "notebooks"
        elif ALONE & {*getattr(item, "fixturenames", ())}:
            group = "alone"
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: GROUPS.get(item.get_closest_marker("xdist_group").args[0], 2))


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch):
    """A test may itself run inside a Slurm job or under torchrun: its ranks must not inherit that."""
    for name in os.environ.keys() - {"SLURM_CONF"}:
        if INHERITED.match(name) or OF_A_JOB.match(name):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A data folder with 512 training and 200 test images."""
    return write_digits(tmp_path_factory.mktemp("digits"), train=512, test=200)


@pytest.fixture
def mpirun():
    """The test needs mpirun: it fails in CI without one, and is skipped elsewhere."""
    if not shutil.which("mpirun"):
        fail_in_ci("no mpirun on this machine: install openmpi-bin")


@pytest.fixture(scope="session")
def cluster():
    """The test needs the course's Slurm: it fails in CI without one, and is skipped elsewhere."""
    if not available() or not run_slurm("sinfo", "--noheader", "--partition=course").stdout.strip():
        fail_in_ci("no Slurm answers: slurm/cluster with pytest")


@pytest.fixture(scope="module")
def browser():
    """The test needs Chromium: it fails in CI without one, and is skipped elsewhere."""
    from browser.server import chromium, chromium_path, has_sandbox  # here: no other test needs Playwright

    if not chromium_path():
        fail_in_ci("no Chromium on this machine: install chromium")
    if not has_sandbox():
        fail_in_ci("Chromium has no sandbox here: install chromium-sandbox")
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One kernel for all tests: each leaves ranks with which the next can begin."""
    from kernels import Kernel  # here: no other test needs a kernel

    made = Kernel(tmp_path_factory.mktemp("kernel"))
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel()
