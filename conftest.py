"""What every test and notebook starts from: no launcher's variables around it, a Slurm, digits.

pytest asks a conftest.py for what lies below its folder alone, and the notebooks lie beside tests/.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent
GIVEN = dict(os.environ)
# Tests run in several processes: each has its own run folders, which ddp_helpers reads from this
# when it is imported, and its own Slurm.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
os.environ["DDP_RUNS"] = str(ROOT / "build" / "tests" / WORKER / "runs")
# ruff: noqa: E402

# Hidden GPUs make every machine alike: all tests run on CPUs, and ranks can be forked after a
# backward. A test that wants some pretends them. Set before torch can ask for them; `make test`
# never uses a GPU, and of `make gpu` only the programs that it starts do.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import jupyter_client
import nbmake.nb_run
import pytest
from hypothesis import HealthCheck, settings
from real import LIMIT, THOROUGH, fail_in_ci
from solved import ClientWithSolutions

from ddp_helpers.jobs import available
from ddp_helpers.jobs.queue import run_slurm
from ddp_helpers.launch.kernels import KernelOnFiles, WarmKernel
from ddp_helpers.launch.launchers import INHERITED
from ddp_helpers.launch.shared import VARIABLE, shared_server

# The same inputs every time, but in `make test-all`; a slow machine is no failure.
settings.register_profile(
    "course",
    derandomize=not THOROUGH,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("course")

# A shell has what it runs in the background ignore Ctrl-C, and so would the programs that tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Three processes test at once: on two CPUs, threads that wait for one another would spin. Read by
# this process's torch, by a notebook's kernel and by the ranks that it starts.
os.environ["GOMP_SPINCOUNT"] = "0"

# Which nbclient takes, and so nbmake: it can be told of no other. A forked kernel hides an import
# that a cell forgot: `make notebooks` and the weekly run, which start a Python for each, show it.
jupyter_client.AsyncKernelManager = KernelOnFiles if THOROUGH else WarmKernel
nbmake.nb_run.NotebookClient = ClientWithSolutions

# Each notebook and each file of tests is a group, which one process runs as a whole. Those that
# take longest begin first, so that no process is left alone with one at the end.
LONG = (
    "test_faults",
    "test_audit",
    "test_survives",
    "test_commands_of_pages",
    "test_browser",
    "test_reading_edition",
    "test_wheel",
)
# Beside what launchers set; the last the doctor sets, in the process that tests it.
OF_A_JOB = re.compile(r"SLURM_|OMP_|DDP_|TORCH_NCCL_")


def pytest_addoption(parser):
    """`make gpu` is tests/on_gpus with real GPUs."""
    told = (
        "run tests/on_gpus on this machine's GPUs, and write a record into a new folder in this one"
    )
    parser.addoption("--real-gpus", metavar="FOLDER", help=told)


SHARED = ExitStack()  # the server that has torch, of all workers


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts the workers
def pytest_configure(config):
    """Start the server from which ranks and kernels are forked."""
    if not hasattr(config, "workerinput") and not THOROUGH:
        SHARED.enter_context(shared_server())


def pytest_unconfigure():
    """End it."""
    SHARED.close()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Sort the tests into groups, the long ones first; on real GPUs what can be spared is last."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if not config.getoption("--real-gpus"):
        items.sort(key=lambda item: not (item.path.suffix == ".ipynb" or item.path.stem in LONG))


def pytest_collection_finish():
    """One thread for torch, if a test has imported it: this file must not, for those without it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


SLURM: list[subprocess.Popen] = []  # the cluster of this process, once something has needed it


def start_slurm():
    """Start a Slurm for this process, unless it has one. It ends when its pipe does."""
    if SLURM:
        return
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(
        prefix="ddp", dir="/tmp"
    )  # sockets need a short path
    os.environ.pop("SLURM_CONF", None)
    command = [ROOT / "slurm" / "cluster", "with", "sh", "-c", 'echo "$SLURM_CONF"; exec cat']
    pipe = subprocess.PIPE
    SLURM.append(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    )
    if conf := SLURM[0].stdout.readline().strip():
        os.environ["SLURM_CONF"] = conf


def pytest_runtest_setup(item):
    """Give a notebook its Slurm; a test asks for the fixture `cluster`."""
    if item.path.suffix == ".ipynb":
        start_slurm()


def pytest_sessionfinish():
    """End the Slurm of this process."""
    for started in SLURM:
        started.stdin.close()
        started.wait(timeout=LIMIT)
        shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch):
    """A test may run inside a Slurm job or under torchrun: its ranks must not inherit that."""
    for name in os.environ.keys() - {"SLURM_CONF", "DDP_RUNS", VARIABLE}:
        if INHERITED.match(name) or OF_A_JOB.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where a test before has changed it


@pytest.fixture(scope="session")
def given_environment():
    """What these tests were started with: real GPUs are not hidden in it."""
    return GIVEN


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A data folder with 512 training and 200 test images."""
    from ddp_helpers.data.digits import write_digits  # here: it imports torch

    return write_digits(tmp_path_factory.mktemp("digits"), train=512, test=200)


@pytest.fixture(scope="session")
def simulated_gpus(tmp_path_factory):
    """A cache with the simulated GPUs, for all processes that test: one of them compiles them."""
    from simulated import built  # here: it imports torch

    folder = tmp_path_factory.getbasetemp()
    return built(folder if WORKER == "alone" else folder.parent)


@pytest.fixture
def mpirun():
    """The test needs mpirun: it fails in CI without one, and is skipped elsewhere."""
    if not shutil.which("mpirun"):
        fail_in_ci("no mpirun on this machine: install openmpi-bin")


@pytest.fixture(scope="session")
def local_slurm():
    """There is a Slurm, where this machine has one to start."""
    start_slurm()


@pytest.fixture(scope="session")
def cluster(local_slurm):
    """The test needs the course's Slurm: it fails in CI without one, and is skipped elsewhere."""
    if not available() or not run_slurm("sinfo", "--noheader", "--partition=course").stdout.strip():
        fail_in_ci("no Slurm answers: install slurmctld, slurmd, slurm-client and munge")


@pytest.fixture(scope="module")
def browser():
    """The test needs Chromium: it fails in CI without one, and is skipped elsewhere."""
    from browser.server import (
        chromium,
        chromium_path,
        has_sandbox,
    )  # here: no other test needs Playwright

    if not chromium_path():
        fail_in_ci("no Chromium on this machine: install chromium")
    if not has_sandbox():
        fail_in_ci("Chromium has no sandbox here: install chromium-sandbox")
    with chromium() as started:
        yield started
