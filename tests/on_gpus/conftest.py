"""Which GPUs the tests of this folder get: simulated ones, or this machine's under `make gpu`; and its record."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from real import THOROUGH
from simulated import MARK, SERVER, Programs, programs

from ddp_helpers import ROOT
from ddp_helpers.launch.launchers import INHERITED

MACHINE = Path(__file__).with_name("machine.py")
OPTION = "--real-gpus"
RECORD = {}  # of `make gpu`: the facts of the machine, and what each step has seen
ON_THIS_MACHINE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",  # so that time-outs end a minute sooner
}


def scope(fixture_name, config):
    """Simulated GPUs end with a file of tests; real ones are asked once who they are."""
    return "session" if config.getoption(OPTION) else "module"


def start_real(given):
    """Programs on this machine's GPUs: each is a Python of its own, of no launcher."""
    mark = str(os.getpid())
    env = {name: text for name, text in given.items() if not INHERITED.match(name)} | ON_THIS_MACHINE | {MARK: mark}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return Programs(subprocess.Popen([sys.executable, SERVER], env=env, start_new_session=True, **pipes), mark)


def ranks_of(facts):
    """As many ranks as the GPUs can have: a power of two, and two on one GPU where NCCL and its mode allow them."""
    if facts["gpus"] == 1:
        return 2 if facts["nccl"] >= [2, 30] and not any("Exclusive" in line for line in facts["smi"]) else 1
    return max(ranks for ranks in (1, 2, 4, 8) if ranks <= facts["gpus"])


@pytest.fixture(scope=scope)
def gpus(request, tmp_path_factory):
    """Programs on GPUs: how many there are, how many ranks they can have, and whether they are simulated."""
    real = request.config.getoption(OPTION)
    with ExitStack() as stack:
        if real:
            started = stack.enter_context(start_real(request.getfixturevalue("given_environment")))
        else:
            started = stack.enter_context(programs(request.getfixturevalue("simulated_gpus"), 4))
        asked = started.start(tmp_path_factory.mktemp("machine") / "log", (MACHINE,))
        if asked.status():
            pytest.exit(f"no GPU that torch can use, so nothing was tried: {asked.said().splitlines()[-1:]}", 1)
        facts = started.facts = json.loads(next(line for line in asked.said().splitlines() if line.startswith("{")))
        started.simulated, started.count, started.ranks = facts["simulated"], facts["gpus"], ranks_of(facts)
        if started.count == 1:
            started.env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two ranks share it
        if real:
            begin_record(Path(real), facts | {"ranks": started.ranks})
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """A step that failed, or came to its time limit, leaves no program to the next one."""
    gpus = request.getfixturevalue("gpus") if "gpus" in request.fixturenames else None
    yield
    while gpus and gpus.started:
        gpus.started.pop().kill()


@pytest.fixture(scope=scope)
def ranks(gpus):
    """The number of ranks, where a step needs two or more."""
    if gpus.ranks == 1:
        pytest.skip("one GPU, which two ranks can share from NCCL 2.30 on, if its mode is not exclusive")
    return gpus.ranks


@pytest.fixture
def mnist(gpus, request):
    """The folder of what is measured: real MNIST. Simulated GPUs have no speed, and get few digits, weekly."""
    if not gpus.simulated:
        return Path(request.getfixturevalue("given_environment").get("DDP_MNIST_ROOT") or ROOT / "data")
    if not THOROUGH:
        pytest.skip("simulated: no speed")
    return request.getfixturevalue("digits")


# ---- the record


@pytest.fixture
def record(request):
    """To be called with what a step has seen, which stands in the record also where the step fails then."""
    seen = {}
    request.node.user_properties.append(("seen", seen))
    return seen.update


def begin_record(home, facts):
    """Make the folder NAME-N of this record, with the first N that is free."""
    name = re.sub(r"\W+", "-", facts["names"][0].lower())
    folder = next(path for number in count(1) if not (path := home / f"{name}-{number}").exists())
    folder.mkdir(parents=True)
    RECORD.update(file=folder / "record.json", facts=facts, steps={})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Write the record anew after each step, whose name is that of its test."""
    report = yield
    if RECORD and (report.when == "call" or not report.passed):
        step = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        step["seen"] = dict(report.user_properties).get("seen", {})
        said = report.longrepr[-1] if report.skipped else report.longreprtext
        RECORD["steps"][item.name.removeprefix("test_")] = step | {"said": said.splitlines()[-20:]}
        text = json.dumps({"facts": RECORD["facts"], "steps": RECORD["steps"]})
        RECORD["file"].write_text(as_elsewhere(text, item.config._tmp_path_factory.getbasetemp()) + "\n")
    return report


def as_elsewhere(text, work):
    """Take this machine's name and its folders out of a text."""
    for name, place in {"WORK": work, "COURSE": ROOT, "PYTHON": sys.prefix, "~": Path.home()}.items():
        text = text.replace(str(place), name)
    name = os.uname().nodename
    return re.sub(rf"\b({re.escape(name)}|{re.escape(name.partition('.')[0])})\b", "HOST", text)
