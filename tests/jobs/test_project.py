"""A script of several files as a job: it runs, and what means something else in the job is said before."""

import shutil
import subprocess
import sys
import time

import pytest
from refusals import refused

from ddp_helpers import ROOT, RUNS, jobs
from ddp_helpers.cli import main

PROJECT = {
    "train.py": "import sys, model\nfrom tools.ranks import size\n"
    "open(sys.argv[1], 'w').write(model.Net(size()) + open(sys.argv[2]).read())",
    "model.py": "def Net(size):\n    import importlib\n    layer = importlib.import_module('layers').LAYER\n"
    "    return f'{size} ranks, {layer}'",
    "settings/rate.txt": ", rate 0.1",
    "layers/__init__.py": "from .dense import LAYER",
    "layers/dense.py": "LAYER = 'dense'",
    "tools/ranks.py": "def size():\n    import os, signal\n    return os.environ['WORLD_SIZE']",  # no __init__.py
    "never/__init__.py": "import signal\nsignal.signal(signal.SIGUSR2, print)",
}
HANDLER = "\nimport signal\nsignal.signal(signal.SIGUSR2, print)"


@pytest.fixture
def name():
    """The name of a run folder that is gone after the test."""
    yield (own := f"test_own_{time.time_ns()}")
    for folder in RUNS.glob(f"{own}*"):
        shutil.rmtree(folder)


@pytest.fixture
def project(tmp_path):
    """A script that imports what lies beside it, in a folder whose name a shell would take apart."""
    folder = tmp_path / 'it\'s my; "$HOME" pro\\ject'
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_script_of_several_files_runs_to_its_end_in_another_folder(project, name, cluster, monkeypatch, capsys):
    monkeypatch.chdir(project)
    words = ["job", "local", "train.py", "--nodes", "2", "--run"]
    assert main([*words, f"{name}-not", "--", "{run_dir}/said.txt", "settings/rate.txt"]) == 0
    relative, _, whole = capsys.readouterr().err.partition(" (after --): give ")
    assert relative.endswith(": settings/rate.txt")
    whole = whole.splitlines()[0]
    assert main([*words, name, "--submit", "--", "{run_dir}/said.txt", whole]) == 0
    out, err = capsys.readouterr()
    assert "rate.txt" not in err, "what it said is all that it takes"
    assert "torch.distributed.run" in out, "a module alone reads torchrun's names"
    assert "train.py imports model.py, tools/, layers/ from " in err and "never" not in err
    jobs.watch(RUNS / name)
    assert (RUNS / name / "said.txt").read_text() == "2 ranks, dense, rate 0.1", capsys.readouterr().out
    assert (RUNS / name / "train.py").read_text() == (project / "train.py").read_text(), "the record of what ran"


def test_without_slurm_a_script_of_several_files_runs_too(project, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    words = ["{run_dir}/said.txt", project / "settings" / "rate.txt"]
    jobs.prepare(project / "train.py", words, jobs.Site.load("local"), tmp_path / "run")
    jobs.submit(tmp_path / "run")
    assert (tmp_path / "run" / "said.txt").read_text() == "1 ranks, dense, rate 0.1"


BEGIN_ELSEWHERE = """
open("data/x.csv")
open(f"data/{args.name}.csv")
yaml.load(Path("rates.yaml"))
MNIST("data", train=True)
MNIST(root="data")
data_folder = "data"
parser.add_argument("--from", "--data", default="data")
parser.add_argument("--data", type=Path, default=Path("data"))
open("../beside.txt")
"""
DO_NOT = """
open("data/absent.csv")
open(f"{args.data}/data/x.csv")
Path(__file__).parent / "rates.yaml"
os.path.join(HERE, "rates.yaml")
batch["data"], dict(split="data"), record("data")
parser.add_argument("--given", "--data", default="data")
open("."), open("./"), open("")
usage = "train.py --lr 0.1"
print("train.py")
"""


def test_relative_paths_that_begin_elsewhere_in_the_job_are_named_and_nothing_else(tmp_path, monkeypatch, capsys):
    folder, site = tmp_path / "mine", jobs.Site.load("local")
    (folder / "data").mkdir(parents=True)
    for file in (folder / "data" / "x.csv", folder / "rates.yaml", tmp_path / "beside.txt"):
        file.touch()
    script, wrong = folder / "train.py", []

    def named(run, words=()):
        jobs.prepare(script, words, site, tmp_path / "runs" / run)
        return capsys.readouterr().err.partition("are relative to the run folder in the job")[2]

    for here in (folder, tmp_path / "data"):  # seen from the folder of the person, or from that of the script
        here.mkdir(exist_ok=True)
        monkeypatch.chdir(here)
        for lines, place in ((BEGIN_ELSEWHERE, "train.py:1"), (DO_NOT, "")):
            for number, line in enumerate(lines.strip().splitlines()):
                script.write_text(line)
                said = named(f"{here.name}{bool(place)}{number}", ["--given=1"])
                if bool(said) != bool(place) or place not in said:
                    wrong.append((here.name, line, said))
    assert not wrong, wrong
    monkeypatch.chdir(folder)
    script.write_text("import module\nopen('data/x.csv')")
    (folder / "module.py").write_text("\nopen('rates.yaml')\nopen('../beside.txt')")
    said = named("all", ["--data=data", "--lr", "0.1", "--from", "data/x.csv", "--split", "data", "{run_dir}/data"])
    places = ["data (after --): ", "data/x.csv (after --): ", "rates.yaml (module.py:2): "]
    assert all(place in said for place in places) and said.endswith("; and 1 more\n") and str(folder / "data;") in said


def test_a_part_of_a_package_is_refused_and_the_script_that_the_refusal_names_runs(tmp_path, monkeypatch, capsys):
    inner, site = tmp_path / "package" / "inner", jobs.Site.load("local")
    inner.mkdir(parents=True)
    for file in (inner.parent / "__init__.py", inner / "__init__.py"):
        file.touch()
    (inner / "train.py").write_text("import signal, sys\nfrom ..model import NET\nopen(sys.argv[1], 'w').write(NET)")
    (inner.parent / "model.py").write_text("NET = 'net, SIGUSR2'")
    with pytest.raises(jobs.JobError) as refusal:
        jobs.prepare(inner / "train.py", (), site, tmp_path / "run")
    assert "train.py, line 2: 'from ..model import NET'" in str(refusal.value) and not (tmp_path / "run").exists()
    place, _, line = str(refusal.value).partition(" with only this line: ")
    assert place.endswith("a script next to package/")
    (tmp_path / "start.py").write_text(line)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    job = jobs.prepare(tmp_path / "start.py", ["{run_dir}/said.txt"], site, tmp_path / "run", requeue=True)
    assert job.grace, "its modules are found: one handles the warning"
    jobs.submit(tmp_path / "run")
    assert (tmp_path / "run" / "said.txt").read_text() == "net, SIGUSR2"

    capsys.readouterr()
    (inner / "train.py").write_text("import absent_package\nfrom package.model import NET")
    jobs.prepare(inner / "train.py", (), site, tmp_path / "above")
    err = capsys.readouterr().err
    assert f"imports package, which is in {tmp_path}, " in err and "absent" not in err
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as export PYTHONPATH, before the command
    jobs.prepare(inner / "train.py", (), site, tmp_path / "exported")
    assert "imports package" not in capsys.readouterr().err


def test_what_the_person_must_know_stands_below_the_job_file(project, name):
    (project / "train.py").write_text("from pathlib import Path\nimport model\nprint(Path(__file__).parent)\n")
    words = [sys.executable, "-m", "ddp_helpers", "job", "local", str(project / "train.py"), "--run", name, "--requeue"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    job_file, _, rest = done.stdout.partition('exit "${status:-0}"\n')
    assert job_file.startswith("#!/bin/bash\n") and done.returncode == 0, done.stdout
    lines = rest.split("\n", 4)[1:]
    for line, said in zip(lines, ("handles no SIGUSR2", "imports model.py, layers/ from", "__file__"), strict=False):
        assert line.startswith("train.py ") and said in line, done.stdout


def test_a_handler_of_the_warning_counts_in_what_is_imported_and_nowhere_else(project, tmp_path, capsys):
    site = jobs.Site.load("local")
    job = jobs.prepare(project / "train.py", ["out"], site, tmp_path / "first", requeue=True)
    assert job.grace == 0 and "If it does, name SIGUSR2" in capsys.readouterr().err, "never/ is not imported"
    text = (tmp_path / "first" / "job.sbatch").read_text()
    assert "--signal" not in text and "#SBATCH --requeue" in text
    (project / "layers" / "dense.py").write_text(PROJECT["layers/dense.py"] + HANDLER)
    job = jobs.prepare(project / "train.py", ["out"], site, tmp_path / "second", requeue=True)
    assert job.grace == 120 and "SIGUSR2" not in capsys.readouterr().err


@pytest.mark.parametrize("letter", [":", "\n"])
def test_a_folder_that_no_job_can_name_is_refused_where_the_script_needs_it(letter, project, tmp_path):
    odd, site = project.rename(tmp_path / f"odd{letter}name"), jobs.Site.load("local")
    refused(jobs.prepare, odd / "train.py", (), site, tmp_path / "run", named=["model.py", "rename that folder"])
    assert not (tmp_path / "run").exists()
    (odd / "alone.py").write_text("import sys, json\n")
    assert jobs.prepare(odd / "alone.py", (), site, tmp_path / "run").imports_from == "", "the control"
