"""The commands of README and docs/ are typed as they stand, each block in a fresh shell, in a copy of the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from real import LIMIT, weekly

from ddp_helpers import ROOT, jobs

_FILES = (ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.md"))
PAGES = {path.stem: path.read_text() for path in _FILES}
FENCED = re.compile(r"^```(.*)\n(?s:(.*?))^```$", re.M)
ACTIVATE = "source .venv/bin/activate\n"


@dataclass(frozen=True)
class Typed:
    """A block that is typed: its page, how its first command begins, and a pattern of what is then printed."""

    page: str
    begins: str
    prints: str
    status: int = 0
    needs: str = ""  # a fixture: mpirun, or cluster
    then: str = ""  # the block that is typed when the jobs have ended; it prints the pattern then
    exported: tuple[str, ...] = ()  # what the page says is exported before
    weekly: str = ""  # why not every day


TYPED = [
    Typed("README", "python3 -m ddp_helpers plan", "Step 5: data", status=1),
    Typed("README", "python3 -m ddp_helpers explain", "Failed first: rank 1", status=1),
    Typed("AGENTS", "mkdir -p build/mine", "token_loss +not attempted"),
    Typed("tools", "ddp-course explain tests/logs", "Failed first: rank 1", status=1),
    Typed("tools", "ddp-course explain tests/tools/jobfiles", "a torchrun in each task", status=1),
    Typed("your-script", "ddp-course plan", "Step 5: data", status=1),
    Typed("your-script", "ddp-course script simple_ddp", "wrote ranks.py"),
    Typed("your-script", "ddp-course job ours my_training.py --nodes", "it is not submitted"),
    Typed(
        "scripts-and-jobs",
        "ddp-course job ours my_training.py --run",
        "lr/seed2-2: done, no record",
        needs="cluster",
        then="ddp-course collect",
    ),
    Typed("scripts-and-jobs", "ddp-course script mnist_ddp", "images/s.*images/s", needs="mpirun"),
    Typed("scripts-and-jobs", "ddp-course script simple_ddp", "started by env.*all 2 ranks hold the same model"),
    Typed("scripts-and-jobs", "torchrun --nnodes 1", r"(\['my_training.py'\]\s*){2}"),
    Typed("scripts-and-jobs", "ddp-course curve", "After 3 epochs: "),
    Typed("scripts-and-jobs", "python notebooks/track_runs.py", "wrote logs/strong-1x2-cpus1-seed2"),
    Typed("instructors", "cp slurm/sites/TEMPLATE.toml", "it is not submitted"),
    Typed(
        "instructors",
        "site=local",
        "checks ok",
        needs="cluster",
        exported=("SLURM_CONF",),
        weekly="daily its commands are typed in other blocks",
    ),
    Typed("participants", "torchrun", r"all \d+ checks ok"),
    Typed("troubleshooting", "python3 -m ddp_helpers explain", "Failed first: rank 1", status=1),
    Typed("troubleshooting", "torchrun", "COMPLETED", needs="cluster"),
]
NOT_TYPED = {
    ("scripts-and-jobs", "nohup torchrun"): "tests/docs/test_your_script.py runs it, and closes its terminal",
    ("README", "make lab"): "stays open; tests/browser types it, and opens its address",
    ("README", ".venv/bin/ddp-course audit"): "tests/tools/test_audit.py types it, and reads README's rows",
    ("platforms", "docker build"): "needs Docker",
    ("gpus", "make gpu"): "needs a GPU; tests/gpus/test_gpu_record.py gives the same tests simulated ones",
    ("platforms", "#!/bin/bash\n#PBS"): "a job file of PBS, which is not here",
    ("platforms", "srun --ntasks=1"): "stays open, as make lab does",
    ("platforms", "git clone ADDRESS"): "the reader's own address, and another installation of 5 GB",
    ("gpus", "ddp-course gpus"): "tests/tools/test_wheel.py types the example of its --help",
    ("scripts-and-jobs", "ddp-course fits"): "tests/tools/test_wheel.py types the example of its --help",
    ("your-script", "torchrun"): "tests/docs/test_your_script.py types it, with the script of the page",
    ("your-script", "ddp-course audit"): "the same",
    ("scripts-and-jobs", "rsync"): "LOGIN is another machine",
    ("your-script", "ddp-course job --again"): "needs a run that has failed, as in tests/jobs/test_monitor.py",
    ("tools", "ddp-course audit"): "tests/tools/test_wheel.py types the example of its --help",
    ("tools", "ddp-course gpus 2"): "tests/tools/test_audit.py runs it, with a script for GPUs",
    ("tools", "ddp-course hang"): "tests/tools/test_hang.py gives a seed the same words; notebook 17 types one",
    ("instructors", "git clone ADDRESS"): "the same, for all, in a folder that all nodes share",
    ("instructors", "ddp-course data /shared"): "the shared folder again",
    ("instructors", "git clone /shared"): "a copy from there, in which JupyterLab is opened",
    ("instructors", "python -m ipykernel"): "a test below types it, and asks the kernel",
    ("instructors", "ddp-course grade"): "needs people's notebooks; tests/lessons/test_grade.py makes some",
    ("participants", "ssh YOUR_LOGIN"): "another machine, and the instructor's own folders",
    ("participants", "JUPYTER_PREFER_ENV_PATH=1"): "stays open, as make lab does",
    ("instructors", "pip download"): "downloads all packages, for a machine without a network",
}
PYTHON = {"your-script": ("python",), "scripts-and-jobs": ("python",)}  # run by tests/docs/test_your_script.py
MINE = {  # files that the pages take for the reader's own
    "my_training.py": "import sys\nprint(sys.argv)\n",
    "slurm/sites/ours.toml": (ROOT / "slurm" / "sites" / "local.toml").read_text(),
}


def fences(pages: dict[str, str]) -> list[tuple[str, str, str]]:
    """Each fenced block of the pages: its page, its language, and what stands in it."""
    return [(page, *fence) for page, text in pages.items() for fence in FENCED.findall(text)]


def in_lists(page: str, text: str) -> int:
    """How many entries of the two lists a block of commands has."""
    begins = [(case.page, begin) for case in TYPED for begin in (case.begins, case.then) if begin]
    first = text.removeprefix(ACTIVATE)
    return sum(page == where and first.startswith(begin) for where, begin in (*begins, *NOT_TYPED))


def unlisted(pages: dict[str, str]) -> list[str]:
    """Blocks of commands that are not in exactly one of the two lists, and blocks of an unknown language."""
    wrong = [
        f"{page}: {text}"
        for page, language, text in fences(pages)
        if language not in ("text", "toml", "yaml", "diff", *PYTHON.get(page, ()))
        and (language != "bash" or in_lists(page, text) != 1)
    ]
    count = sum(in_lists(page, text) for page, language, text in fences(pages) if language == "bash")
    listed = len(TYPED) + sum(bool(case.then) for case in TYPED) + len(NOT_TYPED)
    return [*wrong, *(["an entry has no block"] if count != listed else [])]


def test_each_block_is_typed_or_says_why_not() -> None:
    assert unlisted(PAGES) == []
    for block in ("```bash\nls\n```\n", "```\nls\n```\n", "```sh\nls\n```\n"):  # the controls
        assert len(unlisted(PAGES | {"scripts-and-jobs": PAGES["scripts-and-jobs"] + block})) == 1
    assert len(unlisted(PAGES | {"scripts-and-jobs": ""})) == 1


def block(page: str, begins: str) -> str:
    """The commands of the block that begins so."""
    texts = [text for where, _, text in fences(PAGES) if where == page]
    return next(text for text in texts if text.removeprefix(ACTIVATE).startswith(begins))


@pytest.fixture
def desk(tmp_path: Path, digits: Path) -> Path:
    """A copy of the checkout, with its environment, a small dataset, and what the pages take for the reader's own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shutil.copytree(digits, tmp_path / "data")
    for name, text in MINE.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def typed(text: str, desk: Path, *exported: str, slurm: bool = True) -> subprocess.CompletedProcess:
    """Type commands in a fresh shell on the desk, of which the first that fails is the last.

    slurm: a Slurm that another test has started may answer; else none does.
    """
    kept = "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "XDG_STATE_HOME", "GOMP_SPINCOUNT", *exported
    env = {name: os.environ[name] for name in kept if name in os.environ}
    own = Path(sys.prefix, "bin").resolve()  # which a fresh shell does not have on its path
    path = [part for part in os.environ["PATH"].split(":") if Path(part).resolve() != own]
    env |= {"PATH": ":".join(path), "PYTHONPATH": str(desk)}  # the helpers of the copy, not those of the checkout
    env |= {} if slurm else {"SLURM_CONF": "none"}
    if os.getuid() == 0:  # mpirun asks root for these in its own words
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": LIMIT}
    return subprocess.run(command, cwd=desk, env=env, check=False, **out)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.page}: {case.begins}", marks=[weekly] * bool(case.weekly)) for case in TYPED],
)
def test_a_block_works_as_typed(case: Typed, request: pytest.FixtureRequest, desk: Path) -> None:
    """It prints what it should, and leaves with the status that it should; so does what is typed after it."""
    if case.needs:
        request.getfixturevalue(case.needs)
    done = typed(block(case.page, case.begins), desk, *case.exported, slurm=bool(case.needs))
    assert done.returncode == case.status, done.stdout[-3000:]
    folders = [path.parent for path in sorted((desk / "runs").rglob("job.sbatch"))]
    if case.then:
        for folder in folders:
            jobs.watch(folder)
        done = typed(block(case.page, case.then), desk)
        assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(case.prints, done.stdout, re.S), done.stdout[-3000:]
    for folder in folders:
        if number := json.loads((folder / "job.json").read_text())["job_id"]:
            jobs.cancel(number)  # what is only submitted need not train


def test_a_site_whose_doctor_has_a_red_row_is_not_ready(cluster, desk: Path) -> None:
    """The course's GPUs are only counted: without --no-cuda in the site file the ranks look for them in vain."""
    (desk / "hopeful.toml").write_text('sbatch = ["--partition=course"]\n')
    done = typed(f"{ACTIVATE}ddp-course check-site hopeful.toml --nodes 1 --gpus 1", desk)
    assert done.returncode == 1 and " failed" in done.stdout and "is given, but" in done.stdout, done.stdout


def test_a_kernel_of_a_shared_environment_has_the_helpers_of_the_learners_copy(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started by a Jupyter that knows nothing of the shell in which it was installed."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(desk / "jupyter"))
    (desk / "where.py").write_text("import os, ddp_helpers; print(ddp_helpers.ROOT, os.environ['DDP_MNIST_ROOT'])")
    install = block("instructors", "python -m ipykernel")
    assert block("platforms", "git clone ADDRESS").splitlines()[-1] in install
    ask = "cd notebooks\nenv -u PYTHONPATH JUPYTER_PREFER_ENV_PATH=0 jupyter run ../where.py"
    done = typed(install + ask, desk, "JUPYTER_DATA_DIR")
    assert f"{desk} /shared/ddp/data\n" in done.stdout, done.stdout[-3000:]


def test_the_cells_for_kaggle_start_ranks_from_a_kernel_whose_forks_cannot_use_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has only asked whether there is a GPU, which is enough: without the question a fork says otherwise."""
    monkeypatch.setenv("PATH", f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}")
    typed = [text for page, _, text in fences(PAGES) if page == "platforms" and text[0] in "%!"]
    forked = """def rank(_): torch.zeros(1, device="cuda")
        try: mp.start_processes(rank, nprocs=1, start_method="fork")
        except Exception as error: print(error)""".replace("        ", "")
    texts = ["import torch, torch.multiprocessing as mp", forked, "torch.cuda.is_available()", forked, *typed]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
    NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert ["Cannot re-initialize CUDA in forked subprocess" in said[cell] for cell in (1, 3)] == [False, True]
    assert all(f"rank {rank} of 2 on c" in said[-1] for rank in range(2)), said[-1]
