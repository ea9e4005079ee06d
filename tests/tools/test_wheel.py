"""`ddp-course` from a wheel, in a fresh environment without the checkout: each tool works in an empty folder."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from real import LIMIT, fail_in_ci
from refusals import one_line

from ddp_helpers import ROOT

WITH_JSON = ("doctor", "audit", "fits")
MODEL = """
import layers
def Net(): return layers.net(8)
"""
LAYERS = """
from torch import nn
def net(width): return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Linear(width, 784))
"""


def run(command, cwd, **env):
    """Run a command without anything of the checkout on its path."""
    lean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DDP_RUNS"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=lean | env, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the checkout, so that nothing that lies about there comes into it."""
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists() and not name.startswith(("notebooks/", "tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = run([*build, "-w", source / "dist", source], source)
    assert built.returncode == 0, built.stderr
    [path] = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The programs of a fresh environment with the wheel, which sees what it depends on, but not the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=LIMIT)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    installed = run(install, folder)
    assert installed.returncode == 0, installed.stderr
    [site] = folder.glob("lib/*/site-packages")
    (site / "depends.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    where = run([python, "-c", "import ddp_helpers; print(ddp_helpers.__file__)"], folder)
    assert Path(where.stdout.strip()).is_relative_to(site), where
    return folder / "bin"


@pytest.fixture
def desk(tmp_path):
    """A folder with nothing but somebody's own files."""
    (folder := tmp_path / "desk").mkdir()
    shutil.copyfile(ROOT / "notebooks" / "spirals_ddp.py", folder / "train.py")
    shutil.copyfile(ROOT / "tests" / "logs" / "example.log", folder / "train.log")
    (folder / "model.py").write_text(MODEL)
    (folder / "layers.py").write_text(LAYERS)
    return folder


def left(folder):
    """What lies in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def tool(programs, desk, *words, program="ddp-course", temporary=None):
    """Run ddp-course; torchrun is that of the tests' own environment."""
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = str(desk.parent / "cache")
    return run([program, *words], desk, PATH=path, TMPDIR=str(temporary or desk.parent), XDG_CACHE_HOME=cache)


def example(programs, desk, name):
    """The command line that a tool's --help gives as an example."""
    shown = tool(programs, desk, name, "--help")
    assert shown.returncode == 0 and re.search(r"exit status: [01]: ", shown.stdout), shown
    return re.search(r"^example:\n +(.+)$", shown.stdout, re.M)[1]


def test_the_wheel_has_what_a_job_needs_and_nothing_of_the_course(wheel):
    names = run([sys.executable, "-m", "zipfile", "-l", wheel], wheel.parent).stdout
    assert all(name in names for name in ("ddp_helpers/jobs/job.sbatch.jinja", "jobs/sites/local.toml"))
    assert not re.search(r"lessons/|upkeep/|tests/|\.ipynb", names)


EXAMPLES = {  # each tool, the exit status of its example, and what that leaves in the folder
    "doctor": (0, set()),
    "audit": (0, set()),  # no row is red, and all was seen
    "fits": (0, set()),
    "script": (0, {"my_ddp.py"}),
    "job": (0, {"first", "first/job.json", "first/job.sbatch", "first/train.py"}),
    "explain": (1, set()),  # it is explained
    "plan": (1, set()),  # it is listed
    "gpus": (0, set()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_tool_works_and_leaves_only_what_it_names(name, programs, desk):
    (program, *words), before = shlex.split(example(programs, desk, name)), left(desk)
    words += ["--save=spirals.pt"] if name == "audit" else []
    if name == "gpus":
        words[1:1] = ["--beside-real-gpus"]
        if shutil.which("g++") is None:
            fail_in_ci("simulated GPUs need g++")
    if name in WITH_JSON:
        before.add("answer.json")
        # Before the -- of the tool; the doctor's is torchrun's, and stands before the tool.
        end = words.index("--") if "--" in words and name != "doctor" else len(words)
        words[end:end] = ["--json", "answer.json"]
    (temporary := desk.parent / "temporary").mkdir()
    done, (status, leaves) = tool(programs, desk, *words, program=program, temporary=temporary), EXAMPLES[name]
    assert done.returncode == status, done.stdout + done.stderr
    assert left(desk) == before | leaves
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torch")]  # torchrun's own
    if name in WITH_JSON:
        assert json.loads((desk / "answer.json").read_text())["rows"]


def test_who_hangs_reads_what_its_own_watched_py_has_ranks_leave(programs, desk):
    assert tool(programs, desk, "who-hangs", "--watched", "watched.py").returncode == 0
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = run([*start, "watched.py", "train.py", "--epochs", "1"], desk, TORCH_FR_BUFFER_SIZE="100")
    assert ran.returncode == 0, ran.stderr
    program, *words = shlex.split(example(programs, desk, "who-hangs"))
    assert (program, words[-1]) == ("ddp-course", "recorder_rank*.json")
    dumps = sorted(map(str, desk.glob(words[-1])))
    assert tool(programs, desk, "who-hangs", *dumps).returncode == 0
    lost = tool(programs, desk, "who-hangs", dumps[0], "--json", "answer.json")
    assert lost.returncode == 1 and "rank 1" in lost.stdout
    assert json.loads((desk / "answer.json").read_text())["ended"] is False


def test_what_cannot_be_used_is_one_line_and_leaves_nothing(programs, desk):
    """Each tool's own are in the tests of the tool; hang and grade are of the course, and not in its wheel."""
    before = left(desk)
    for words in (("job", "local"), ("doctor", "--none"), ("none",), ("hang", "--seed", "7"), ("grade", ".")):
        done = tool(programs, desk, *words)
        assert (done.returncode, done.stdout) == (2, ""), done
        one_line(re.sub("^usage: ddp-course doctor .*\n", "", done.stderr))  # it reads its flags as a script does
    assert left(desk) == before
