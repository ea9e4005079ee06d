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
from real import LIMIT
from refusals import one_line

from ddp_helpers import ROOT

MOST = 400_000  # bytes of the wheel
TOOLS = ("data", "script", "doctor", "job", "ready", "collect", "curve")
TOOLS += ("explain", "audit", "fits", "who-hangs", "hang", "grade")
WITH_JSON = ("doctor", "audit", "fits", "who-hangs")
TRAIN = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
MODEL = """
import layers
def Net(): return layers.net(8)
def Large(): return layers.net(4_000_000)
"""
LAYERS = """
from torch import nn
def net(width): return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Linear(width, 784))
"""
RED = (("world_size, sampler=sampler", "world_size, shuffle=True"),)


def run(command, cwd, **env):
    """Run a command without anything of the checkout on its path."""
    lean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=lean | env, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the checkout, so that nothing that lies about there comes into it."""
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("notebooks/", "tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
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
    (folder / "train.py").write_text(TRAIN)
    (folder / "model.py").write_text(MODEL)
    (folder / "layers.py").write_text(LAYERS)
    return folder


def left(folder):
    """What lies in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def tool(programs, desk, *words):
    """Run ddp-course; torchrun is that of the tests' own environment."""
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run([programs / "ddp-course", *words], desk, PATH=path, TMPDIR=str(desk.parent))


def example(programs, desk, name):
    """The command line that a tool's --help gives as an example."""
    shown = tool(programs, desk, name, "--help")
    assert shown.returncode == 0 and "exit status: 0: " in shown.stdout, shown
    return re.search(r"^example:\n +(.+)$", shown.stdout, re.M)[1]


def test_the_wheel_is_small_and_has_what_a_job_needs(wheel):
    names = run([sys.executable, "-m", "zipfile", "-l", wheel], wheel.parent).stdout
    assert wheel.stat().st_size < MOST
    assert all(name in names for name in ("ddp_helpers/slurm/job.sbatch.jinja", "sites/local.toml"))
    assert not re.search(r"lessons/|upkeep/|tests/|\.ipynb", names)


def test_help_lists_every_tool(programs, desk):
    listed = tool(programs, desk, "--help").stdout
    assert [name for name in TOOLS if not re.search(rf"^ +{name}( |$)", listed, re.M)] == []


LEAVES = {  # each tool, and what its example leaves in the folder
    "doctor": set(),
    "audit": set(),
    "fits": set(),
    "script": {"my_ddp.py"},
    "job": {"first", "first/job.json", "first/job.sbatch", "first/train.py"},
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_example_of_a_tool_works_and_leaves_only_what_it_names(name, programs, desk):
    words, before = shlex.split(example(programs, desk, name)), left(desk)
    words += ["--save=spirals.pt"] if name == "audit" else []
    if name in WITH_JSON:
        before.add("answer.json")
        # Before the -- of the tool; the doctor's is torchrun's, and stands before the tool.
        end = words.index("--") if "--" in words and name != "doctor" else len(words)
        words[end:end] = ["--json", "answer.json"]
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (temporary := desk.parent / "temporary").mkdir()
    done = run(words, desk, PATH=path, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stdout + done.stderr
    assert left(desk) == before | LEAVES[name]
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


def test_a_log_is_explained(programs, desk):
    """What a real run printed: rank 1 fails."""
    (desk / "fails.py").write_text("import os\nassert os.environ['RANK'] == '0', 'no GPU for me'\n")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "fails.py"]
    (desk / "train.log").write_text(run(start, desk).stderr)
    words, before = shlex.split(example(programs, desk, "explain")), left(desk)
    explained = tool(programs, desk, *words[1:], "--json")
    assert explained.returncode == 1 and left(desk) == before, explained  # an exception of the reader's own code
    assert json.loads(explained.stdout) and "no GPU for me" in explained.stdout
    for line, status in (("epoch 1: 250/250 right", 4), ("State: COMPLETED (exit code 0)", 0)):
        (desk / "train.log").write_text(f"{line}\n")
        assert tool(programs, desk, *words[1:]).returncode == status


def test_ci_can_use_the_exit_statuses(programs, desk):
    text = TRAIN
    for right, wrong in RED:
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (desk / "wrong.py").write_text(text)
    assert tool(programs, desk, "audit", "wrong.py", "--", "--epochs=1").returncode == 1
    assert tool(programs, desk, "audit", "train.py", "--", "--epochs=1").returncode == 3  # one order: not seen
    large = ["fits", "model.py:Large", "--input", "784", "--gpu", "16"]
    assert tool(programs, desk, *large).returncode == 1
    assert tool(programs, desk, "doctor").returncode == 0
    assert tool(programs, desk, "doctor", "--data", "nothing_here").returncode == 1


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "none.py"),
        ("audit", "train.py", "--json", "none/table.json"),
        ("fits", "model.py:None"),
        ("fits", "none.py:Net"),
        ("job", "local"),
        ("job", "nowhere", "train.py"),
        ("script", "none", "none.py"),
        ("who-hangs", "train.py"),
        ("who-hangs",),
        ("who-hangs", "--watched", "train.py"),
        ("doctor", "--none"),
        ("explain", "none.log"),
        ("none",),
        ("hang", "--seed", "7"),  # of the course, and not in its wheel
        ("grade", "."),
    ],
)
def test_what_cannot_be_used_is_one_line_and_leaves_nothing(words, programs, desk):
    before, done = left(desk), tool(programs, desk, *words)
    assert (done.returncode, done.stdout) == (2, ""), done
    one_line(re.sub("^usage: ddp-course doctor .*\n", "", done.stderr))  # it reads its flags as a script does
    assert left(desk) == before
