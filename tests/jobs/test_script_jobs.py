"""Anybody's own script as a job: it runs as it is, what is wrong is said before it waits, and its sweep is drawn."""

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from refusals import ended, one_line, refused
from run_folders import write_run

from ddp_helpers import ROOT, RUNS, jobs
from ddp_helpers.cli import main
from ddp_helpers.draw.curves import curves
from ddp_helpers.jobs.script_jobs import ready
from ddp_helpers.rank.scripts import mnist_ddp
from ddp_helpers.records import runs

SCRIPT = """
import argparse, os, pathlib
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
dist.init_process_group("gloo", rank=rank, world_size=size)
ranks = torch.ones(1)
dist.all_reduce(ranks)
if rank == 0:
    args.out.write_text(f"{ranks.item():.0f} ranks, lr {args.lr}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def mine(tmp_path):
    """A script that the course has never seen."""
    path = tmp_path / "my_task.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def name():
    """The name of a run folder that is gone after the test."""
    yield (own := f"test_own_{time.time_ns()}")
    for folder in RUNS.glob(f"{own}*"):
        shutil.rmtree(folder)


def test_a_strangers_script_runs_on_two_nodes_for_each_value_of_a_sweep(mine, name, cluster, capsys):
    shape = f"--run {name} --nodes 2 --gpus 1 --array 0.1 1e-2 --submit".split()
    assert main(["job", "local", str(mine), *shape, "--", "--lr={array}", "--out", "{run_dir}/said.txt"]) == 0
    assert 'my_task.py --lr="${values[$SLURM_ARRAY_TASK_ID]}" --out "$run_dir"/said.txt' in capsys.readouterr().out
    folder = RUNS / name
    jobs.watch(folder)
    tasks = sorted(folder.parent.glob(f"{name}-*"))
    assert runs.table(folder, *tasks)["state"].tolist() == ["pending"]  # without a record, until Slurm is asked
    capsys.readouterr()
    assert main(["collect", str(folder)]) == 0
    assert capsys.readouterr().out.count(": done, no record, 0 epochs\n") == 2
    assert runs.table(folder, *tasks)["state"].tolist() == ["done, no record"] * 2
    said = [(RUNS / f"{name}-{task}" / "said.txt").read_text() for task in range(2)]
    assert said == ["2 ranks, lr 0.1", "2 ranks, lr 0.01"]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_without_gpus_sees_none_of_its_node(launcher, mine, name, cluster):
    mine.write_text(
        "import os, pathlib, sys\npathlib.Path(sys.argv[1]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    for gpus in (0, 1):
        shape = f"--run {name}{gpus} --gpus {gpus} --ranks 1 --launcher {launcher} --submit".split()
        assert main(["job", "local", str(mine), *shape, "--", "{run_dir}/seen.txt"]) == 0
        jobs.watch(RUNS / f"{name}{gpus}")
    assert [(RUNS / f"{name}{gpus}" / "seen.txt").read_text() for gpus in (0, 1)] == ["", "0"]


def test_what_the_learner_says_counts_more_than_what_the_site_says(tmp_path, monkeypatch):
    site = jobs.Site.load("pyxis")
    assert site.has_data
    for words, data in (("--data", "/mine"), "/mine"), ((), "/data"):
        job = jobs.prepare("mnist_ddp", words, site, tmp_path / data[1:])
        monkeypatch.setattr(sys, "argv", list(job.program))
        assert mnist_ddp.read_flags(1).data == Path(data), "what the script makes of its words"


SITES = {"gpus": 'cpus_per_rank = 7\ntime = "00:20:00"\n', "cpus": 'gpus = ""\n'}
SHAPES = {
    "the site's usual ones": ("gpus", "", ["--cpus-per-task=7", "--time=00:20:00", "--gres=gpu:1"]),
    "one's own": ("gpus", "--cpus-per-rank 3 --time 5 --gpus 2", ["--cpus-per-task=3", "--time=5", "--gres=gpu:2"]),
    "four ranks on CPUs": ("cpus", "--gpus 0 --ranks 4", ["--ntasks-per-node=4", "--cpus-per-task=1"]),
    "a rank on a CPU": ("cpus", "", ["--ntasks-per-node=1", "--time=00:10:00"]),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_a_job_does_not_say_its_site_says(case, mine, name, tmp_path, capsys):
    site, words, asked = SHAPES[case]
    (tmp_path / "site.toml").write_text(SITES[site])
    assert main(["job", str(tmp_path / "site.toml"), str(mine), "--run", name, *words.split()]) == 0
    said = {line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()}
    assert {f"#SBATCH {word}" for word in asked} <= said
    assert site == "gpus" or not any("gpu" in line for line in said if line.startswith("#SBATCH"))


def test_gpus_that_a_site_does_not_have_are_refused(mine, name, tmp_path):
    (tmp_path / "site.toml").write_text(SITES["cpus"])
    words = ["job", str(tmp_path / "site.toml"), str(mine), "--run", name, "--gpus", "2"]
    refused(main, words, named=["gpus_per_node=2", "site site", "--gpus-per-node 0 --ranks-per-node 2"])
    assert not (RUNS / name).exists()


@pytest.fixture
def nowhere(tmp_path):
    """A site that Slurm refuses; not many ranks, which would all start on this machine if Slurm has just gone."""
    path = tmp_path / "nowhere.toml"
    path.write_text('sbatch = ["--partition=nowhere"]\n')
    return path


def test_slurm_says_in_its_own_words_what_it_would_not_take_before_anything_is_submitted(
    mine, name, nowhere, cluster, capsys
):
    words = ["job", str(nowhere), str(mine), "--run", name]
    assert main(words) == 1
    assert "invalid partition specified: nowhere" in capsys.readouterr().err
    assert main([*words[:-1], f"{name}-2", "--sbatch=--partition=course --comment='a b'"]) == 0
    out, err = capsys.readouterr()
    assert "would take it" in err and '#SBATCH --partition=course\n#SBATCH "--comment=a b"\n' in out


STARTED_BY = {
    "rank = os.environ['LOCAL_RANK']": "torchrun",
    "dist.init_process_group('gloo')": "torchrun",
    "rank = os.environ.get('RANK') or os.environ['SLURM_PROCID']": "srun",
    "rank = 0": "srun",
}


def test_a_script_that_knows_only_torchruns_names_is_started_by_torchrun(tmp_path, capsys):
    script, site = tmp_path / "theirs.py", jobs.Site.load("local")
    for number, (line, launcher) in enumerate(STARTED_BY.items()):
        script.write_text(f"import os\nimport torch.distributed as dist\n{line}\n")
        job = jobs.prepare(script, (), site, tmp_path / f"run-{number}", ranks_per_node=2)
        said = "torchrun starts" in capsys.readouterr().err
        assert (job.launcher, said) == (launcher, launcher == "torchrun"), line
        other = jobs.prepare(script, (), site, tmp_path / f"other-{number}", launcher="srun")
        assert other.launcher == "srun", "who says it has it"


def tree(folder):
    """What lies below a folder: each path, and what is in it if it is a file."""
    return {path: path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def test_after_a_refusal_of_slurms_the_tree_is_as_before(mine, name, nowhere, cluster, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "noted").mkdir()
    for file in ("notes.txt", mine.name):  # the script may lie in the folder of its run
        (tmp_path / "noted" / file).write_text(SCRIPT)
    before = tree(tmp_path)
    for folder in (tmp_path / "empty", tmp_path / "noted", tmp_path / "a" / "b" / "run"):
        jobs.prepare(mine, (), jobs.Site.load(nowhere), folder)
        assert {"job.json", "job.sbatch", mine.name} <= {path.name for path in folder.iterdir()}
        refused(jobs.submit, folder, named=["partition"])
        assert tree(tmp_path) == before, folder
    with pytest.raises(SystemExit, match="2"):
        main(["job", str(nowhere), str(mine), "--run", name, "--submit"])
    out, err = capsys.readouterr()
    assert out.startswith("#!"), "the job file was shown before it was submitted"
    one_line(err.splitlines()[-1], "partition")
    refused(ready, nowhere, RUNS / name, None, named=["partition"])
    assert not (RUNS / name).exists()


def test_a_script_of_the_same_name_is_neither_overwritten_nor_removed_and_no_job_is_left(mine, tmp_path):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / mine.name).write_text("theirs")
    (tmp_path / "folder" / mine.name).mkdir(parents=True)
    before = tree(tmp_path)
    for folder in (tmp_path / "file", tmp_path / "folder"):
        refused(jobs.prepare, mine, (), jobs.Site.load("local"), folder, named=["File exists", "folder"])
        assert tree(tmp_path) == before


def test_where_the_job_file_does_not_fit_nothing_half_made_stays(mine, name):
    def small_files():  # as if the disk were full behind the first 2,000 bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))

    words = [sys.executable, "-m", "ddp_helpers", "job", "local", str(mine), "--run", f"{name}/a/b"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, preexec_fn=small_files, check=False)
    ended(done.returncode, "", done.stderr, "File too large")
    assert not (RUNS / name).exists()


def test_a_folder_that_was_copied_is_not_taken_for_a_job_of_this_slurm(mine, tmp_path, cluster, capsys):
    folder = tmp_path / "first"
    mine.write_text("print('done')\n")
    jobs.prepare(mine, (), jobs.Site.load("local"), folder)
    jobs.submit(folder)
    jobs.watch(folder)
    shutil.copytree(folder, tmp_path / "copy")
    capsys.readouterr()
    [run] = jobs.collect(tmp_path / "copy")
    assert f"job {run.job['job_id']}" in capsys.readouterr().out and run.job["state"] == "PENDING"
    [run] = jobs.collect(folder)
    assert run.job["state"] == "COMPLETED", "the control: where it was submitted it is asked"


# ---- runs that were asked for different things


def record(folder, **spec):
    """A finished run of two epochs."""
    line = {"images_per_second": 100.0, "seconds": 1.0, "test_loss": 0.5, "test_accuracy": 0.9}
    spec = {"batch_size": 64, "seed": 1, "data": str(folder), "num_workers": len(folder.name)} | spec
    env = {"world_size": 2, "dataset": "digits", "device": "cpu"}
    write_run(folder, [line | {"epoch": epoch} for epoch in (1, 2)], spec=spec, env=env, status={"state": "done"})


def test_a_value_that_differs_is_a_column_and_no_repeat(tmp_path):
    for number, lr in enumerate((0.1, 0.1, 0.3)):
        record(tmp_path / f"run-{number}", lr=lr, bf16=False, seed=number)
    table = runs.table(tmp_path)
    assert table["lr"].tolist() == [0.1] * 4 + [0.3] * 2 and "bf16" not in table
    assert table["asked"].unique().tolist() == ["lr=0.1", "lr=0.3"]
    labels = " ".join(text.get_text() for ax in curves(table).figure.axes for text in ax.texts)
    plt.close("all")
    assert "lr=0.1" in labels and "lr=0.3" in labels


def test_a_path_in_the_runs_own_folder_is_no_setting(tmp_path):
    for number, lr in enumerate((0.1, 0.1, 0.3)):
        folder = tmp_path / f"repeat-{number}"
        record(folder, lr=lr, out=str(folder), log=f"{folder}/said.txt", notes=f"/elsewhere/{number}")
    shutil.copytree(tmp_path, tmp_path / "copied")
    for table in (runs.table(tmp_path), runs.table(tmp_path / "copied")):
        assert table["lr"].nunique() == 2 and "out" not in table and "log" not in table
        assert table["notes"].nunique() == 3, "the control: another path is one"
