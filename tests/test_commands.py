"""Wrong inputs, as one table for each command: each is told in one line, and nothing is left behind.

A row has what is given, and what the line must name: the value or the flag, and the cure. Words in capitals stand for
the files of `desk`. What is accepted with a word on it stands apart, and so does what is rightly accepted.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jinja2
import markupsafe
import nbformat
import pytest
from packaging.requirements import Requirement
from real import LIMIT, python
from refusals import ended, one_line, refused

from ddp_helpers import ROOT, jobs
from ddp_helpers.cli import main
from ddp_helpers.jobs import queue, script_jobs

ALL = ("--data", "DATA", "--run-dir", "{run_dir}")  # what a training script needs

# ---- ddp-course job local, and what follows

JOB = {
    # the site and the script
    "no such file": (["nowhere.py"], ["'nowhere.py'", "No such file", "mnist_ddp"]),
    "no script of the course": (["mnist"], ["'mnist'", ".py", "mnist_ddp"]),
    "not Python": (["BAD"], ["bad.py", "line 2"]),
    "no text": (["BINARY"], ["binary.py", "fix it"]),
    "nested too deeply": (["DEEP"], ["deep.py", "fix it"]),
    "no file but a pipe": (["FIFO"], ["fifo.py", ".py"]),
    "no file but a folder": (["FOLDER"], ["folder.py", ".py"]),
    "a name with a space": (["SPACED"], ["my script.py", "letters"]),
    "no such person": (["~nosuchuser/x.py"], ["'~nosuchuser/x.py'", "home"]),
    # the run folder
    "outside": (["MINE", "--run", "../evil"], ["'../evil'", "below runs/"]),
    "a folder with a run": (["MINE", "--run", "taken"], ["runs/taken", "job.json", "new folder"]),
    "a file in its place": (["MINE", "--run", "file"], ["runs/file", "another folder"]),
    # the shape: one of the values that a Job refuses, which are in test_job, and what the command itself does
    "no node": (["MINE", "--nodes", "0"], ["nodes=0", "1 to 99999"]),
    "no GPU": (["MINE", "--gpus", "0"], ["gpus_per_node=0", "--ranks-per-node"]),
    "no such flag": (["MINE", "--gpu-type", "a100"], ["--gpu-type", "--help"]),
    # what is the script's
    "a relative path": (["MINE", "--submit", "--", "--data", "runs"], ["runs would be relative", "--submit"]),
    "-- forgotten": (["MINE", "--lr", "1", "--", "--seed", "2"], ["--lr 1", "after --"]),
}
# Written, with a line on what it will not do.
JOB_TOLD = {
    "no record": (["mnist_ddp", "--", "--data", "DATA"], ["no record", "--run-dir '{run_dir}'"]),
    "never warned": (["mnist_ddp_resumable", "--", *ALL], ["--requeue"]),
}
JOB_RIGHT = {
    "words that a shell would read": ["MINE", "--", "a b", "$(touch x)", "é", "--", ""],
    "a file beside a home": ["MINE", "--run", "a/b.c-1", "--time", "0-00:10", "--array", "1e-3", "+2", "--", "{array}"],
}

# ---- a site file

# By the command that makes a job; each wrong value of a file is in test_site, each wrong name in test_fuzz_jobs.
SITE = {
    "a slip": (["SLIP"], ["slip.toml", "'sbach'", "sbatch"]),
    **{
        f"no site {name!r}": ([name], [repr(name), "local", ".toml"])
        for name in ("nowhere", "FOLDER.toml", "FIFO.toml")
    },
}

COMMAND = {
    "no command": ([], ["--help"]),
    "no such command": (["scripts"], ["scripts", "script"]),
    "no path": (["script", "mnist_ddp"], ["path"]),
    "one word too many": (["script", "mnist_ddp", "x.py", "more"], ["more", "--help"]),
    "below a file": (["script", "simple_ddp", "FILE/x.py"], ["file/x.py", "another path"]),
    "in the place of a folder": (["script", "simple_ddp", "FOLDER"], ["folder.py", "another path"]),
    "data into a file": (["data", "FILE"], ["file", "another folder"]),
    "no site to ask, by its old name": (["ready", "nowhere"], ["Slurm", "slurm/cluster up"]),
    "no site to ask": (["check-site", "nowhere"], ["Slurm", "slurm/cluster up"]),
    "words of an audit": (["audit", "MINE", "--lr", "1"], ["--lr 1", "after --"]),
    "no model": (["fits", "MINE:Nothing"], ["'Nothing'", "mine.py"]),
}

# Whatever is given on a command line.
WRONG = {f"job, {case}": (["job", "local", *words], named) for case, (words, named) in JOB.items()}
WRONG |= {f"site, {case}": (["job", *words, "simple_ddp"], named) for case, (words, named) in SITE.items()} | COMMAND

# ---- slurm/job.ipynb: its cells, with these values for its parameters

NOTEBOOK = {
    "a slip in a name": ({"node": 2}, ["'node'", "nodes"]),
    "like no name": ({"zzz": 2}, ["'zzz'", "nodes"]),
    "no text for a script": ({"script": 5}, ["'5'", ".py"]),
    "nodes as text": ({"nodes": "2"}, ["nodes='2'", "1 to 99999"]),
    "a single text": ({"arguments": "--lr 1"}, ["'--lr 1'", "list of words"]),
    "no words": ({"arguments": 5}, ["arguments=5", "list of words"]),
    "half a quotation": ({"sbatch": "--comment='a"}, ["--comment='a", "quotation"]),
}
NOTEBOOK_RIGHT = {
    "numbers where texts are": {"time": 5, "run": 7},
    "words of every kind": {"arguments": ("--lr", 0.5)},
    "a batch for each rank": {"batch_size_per_rank": 63, "batch_size": 63},
}


def rows(table: dict) -> pytest.MarkDecorator:
    """A test for each row of a table."""
    return pytest.mark.parametrize("row", table.values(), ids=table)


@pytest.fixture
def desk(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of all kinds, by the words that stand for them, in an empty folder in which the commands are given."""
    texts = {
        "mine": "import sys\n",
        "bad": "import os\nif:\n",
        "deep": f"x = {200_000 * '-'}1\n",
        "my script": "pass\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "slip.toml").write_text('sbach = ["a"]')
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\xff\x00")
    for name in ("folder.py", "FOLDER.toml", "runs/taken"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("fifo.py", "FIFO.toml"):
        os.mkfifo(tmp_path / name)
    taken = [f"runs/taken/{name}" for name in ("job.json", "spec.json", "metrics.jsonl")]
    for name in ("file", "runs/file", *taken):
        (tmp_path / name).write_text("precious\n")
    monkeypatch.chdir(tmp_path)
    for module in (queue, script_jobs):  # whatever Slurm this machine has, it is not asked
        monkeypatch.setattr(module, "available", lambda: False)
    run_folder = jobs.run_folder
    for module in (jobs, script_jobs):
        monkeypatch.setattr(module, "run_folder", lambda root, *names: run_folder(tmp_path / "runs", *names))
    named = {"MINE": "mine.py", "BAD": "bad.py", "DEEP": "deep.py", "SPACED": "my script.py", "BINARY": "binary.py"}
    named |= {"FIFO": "fifo.py", "FOLDER": "folder.py", "FILE": "file", "SLIP": "slip.toml"}
    return {word: str(tmp_path / name) for word, name in named.items()} | {"DATA": str(digits)}


def filled(words: list[str], desk: dict[str, str]) -> list[str]:
    """The words, with paths for those in capitals, also where one is the beginning of a path."""
    return [re.sub(rf"({'|'.join(desk)})(?=$|[/:])", lambda found: desk[found[0]], word) for word in words]


def tree(folder: Path) -> dict[Path, bytes | None]:
    """What lies below a folder: each path, and what is in it if it is a file; not what Python keeps of an import."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@rows(WRONG)
def test_what_is_wrong_is_told_in_a_line_and_leaves_nothing(row, desk, capfd) -> None:
    before = tree(Path.cwd())
    with pytest.raises(SystemExit) as end:
        main(filled(row[0], desk))
    ended(end.value.code, *capfd.readouterr(), *row[1])
    assert tree(Path.cwd()) == before


@rows(JOB_TOLD)
def test_a_job_that_lacks_something_is_written_with_a_line_on_it(row, desk, capfd) -> None:
    assert main(["job", "local", *filled(row[0], desk), *([] if "--" in row[0] else ["--"])]) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if not re.match("# (it is not|no Slurm)", line)]
    one_line("\n".join(told), *row[1])


@rows(JOB_RIGHT)
def test_a_right_job_is_written_without_a_word(row, desk, capfd) -> None:
    assert main(["job", "local", *filled(row, desk)]) == 0
    out, err = capfd.readouterr()
    assert err.count("\n") == 2 and "sbatch " in err and "#SBATCH" in out


def cells(parameters: dict[str, object], until: str) -> dict[str, object]:
    """Execute the cells of slurm/job.ipynb as papermill does, with these values behind their parameters."""
    space: dict[str, object] = {}
    for cell in nbformat.read(ROOT / "slurm" / "job.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            if until in cell.source:
                return space
            exec(cell.source, space)
            if "parameters" in cell.metadata.get("tags", ()):
                space |= parameters
    raise AssertionError(f"no cell has {until}")


@pytest.fixture
def job_notebook(desk):
    """The cells up to the submission, with the runs on the desk."""

    def execute(parameters: dict[str, object]) -> dict[str, object]:
        return cells({"data": desk["DATA"]} | parameters, "jobs.submit")

    return execute


@rows(NOTEBOOK)
def test_a_wrong_value_in_the_job_notebook(row, job_notebook) -> None:
    before = tree(Path.cwd())
    refused(job_notebook, row[0], named=row[1])
    assert tree(Path.cwd()) == before


@rows(NOTEBOOK_RIGHT)
def test_a_right_value_in_the_job_notebook(row, job_notebook) -> None:
    space = job_notebook(row)
    assert space["folder"].is_relative_to(Path.cwd() / "runs") and (space["folder"] / "job.sbatch").is_file()
    assert json.loads((space["folder"] / "job.json").read_text())["state"] == "WRITTEN"


def test_a_run_goes_to_ddp_runs_in_whichever_folder_it_is_typed(tmp_path) -> None:
    (tmp_path / "script.py").write_text("# init_process_group\n")
    for runs in ("", str(tmp_path / "scratch" / "runs")):
        (here := tmp_path / f"here{len(runs)}").mkdir()
        env = os.environ | {"PYTHONPATH": str(ROOT), "DDP_RUNS": runs, "SLURM_CONF": "/none"}
        done = python("-m", "ddp_helpers", "job", "local", tmp_path / "script.py", "--run", "mine", cwd=here, env=env)
        assert done.returncode == 0, done
        assert (Path(runs or here) / "mine" / "job.sbatch").is_file() and bool(runs) is (list(here.iterdir()) == [])


def test_what_a_shell_types_ends_with_the_line_and_status_2(desk) -> None:
    """The control: what is called in this process above is what the command line does."""
    command = [sys.executable, "-m", "ddp_helpers", "job", "local", "mnist_ddp", "--data", "D"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    ended(done.returncode, done.stdout, done.stderr, "--data D", "after --")


BARE = {  # what needs neither torch nor Jupyter: its words, its exit status, and what it says
    "script": (["mnist_ddp", "mine.py"], 0, "wrote mine.py"),
    "job": (["della", "mine.py", "--run", "first", "--", "--run-dir", "{run_dir}"], 0, "#SBATCH --nodes=1"),
    "collect": (["first"], 2, "was not submitted"),
    "explain": ([str(ROOT / "tests" / "logs" / "example.log")], 1, "exitcode"),
    "plan": ([str(ROOT / "notebooks" / "spirals.py")], 1, "a loader to train from"),
    "who-hangs": (["recorder_rank0.json", "--json", "answer"], 1, "rank 1 left no dump"),
}
LACKING = {  # what needs more, its words, and the extra that brings it
    "audit": (["mine.py"], "torch"),
    "fits": (["mine.py:Net"], "torch"),
    "curve": (["first"], "notebook"),
}


def test_a_command_that_trains_nothing_needs_python_and_jinja2_alone(tmp_path) -> None:
    (libraries := tmp_path / "libraries").mkdir()
    for package in (jinja2, markupsafe):
        (libraries / package.__name__).symlink_to(Path(package.__file__).parent)
    (tmp_path / "recorder_rank0.json").write_text(json.dumps({"pg_status": {}, "world_size": 2}))
    path = os.pathsep.join(map(str, (ROOT, libraries)))
    env = os.environ | {"PYTHONPATH": path, "SLURM_CONF": "/none", "DDP_RUNS": ""}
    assert python("-S", "-c", "import psutil", env=env).returncode, "the control: -S leaves out what is installed"
    for name, (words, status, said) in BARE.items():
        done = python("-S", "-m", "ddp_helpers", name, *words, cwd=tmp_path, env=env)
        assert done.returncode == status and said in done.stdout + done.stderr, done
    for name, (words, extra) in LACKING.items():
        done = python("-S", "-m", "ddp_helpers", name, *words, cwd=tmp_path, env=env)
        ended(done.returncode, done.stdout, done.stderr, "which this Python lacks", f"pip install '{ROOT}[{extra}]'")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [Requirement(text).name for text in project["dependencies"]] == ["jinja2"]
    versions = json.loads((tmp_path / "answer").read_text())["versions"]
    assert versions.keys() == {"ddp-course", "python"}
