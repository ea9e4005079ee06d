"""The course's job on a real Slurm, from papermill's command line to its record; and the same without a Slurm."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real import LIMIT
from refusals import refused

from ddp_helpers import ROOT, RUNS
from ddp_helpers.jobs import Job, Site, collect, rank_lines, submit, watch, write_job
from ddp_helpers.jobs.files import log_of
from ddp_helpers.jobs.sweep import execute
from ddp_helpers.rank import scripts
from ddp_helpers.records import runs

JOB = ROOT / "slurm" / "job.ipynb"
LOCAL = Site.load("local")


@pytest.fixture
def name():
    """The name of a run below runs/, where job.ipynb puts it: a number, as papermill takes it. Removed at the end."""
    number = str(time.time_ns())
    yield number
    shutil.rmtree(RUNS / number, ignore_errors=True)


def test_papermill_runs_a_job_on_two_nodes_as_a_learner_starts_it_from_somewhere_else(cluster, tmp_path, digits, name):
    given = {"nodes": 2, "gpus_per_node": 1, "time": 5, "run": name, "batch_size_per_rank": 16, "data": digits}
    words = [str(word) for key, value in given.items() for word in ("-p", key, value)]
    command = [Path(sys.executable).with_name("papermill"), JOB, tmp_path / "out.ipynb"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = RUNS / name
    run = runs.read_run(folder)
    assert run.state == "done" and run.job["state"] == "COMPLETED" and run.job["exit_code"] == "0:0"
    assert [rank["local_rank"] for rank in run.env["ranks"]] == [0, 0] and run.nodes == 2
    assert [epoch["epoch"] for epoch in run.epochs] == [1] and not run.problems
    assert run.env["job_id"] == run.job["job_id"] == json.loads((folder / "job.json").read_text())["job_id"]
    row = runs.table(folder).iloc[0]
    assert (row["launcher"], row["nodes"], row["site"], row["state"]) == ("slurm", 2, "local", "done")
    assert (row["scaling"], row["batch_per_rank"], row["global_batch"]) == ("weak", 16, 32)
    assert {"job.sbatch", "mnist_ddp.py"} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]  # nothing where papermill was started


def test_a_job_that_fails_fails_the_notebook(cluster, tmp_path, name):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    values = {"script": str(tmp_path / "fails.py"), "gpus_per_node": 1, "run": name}
    refused(execute, JOB, tmp_path / "out.ipynb", **values, named=["job.ipynb", "the run is failed"])
    assert runs.read_run(RUNS / name).job["state"] == "FAILED"


def write_simple(folder, **shape):
    """Write a job of the course's smallest script, whose ranks meet and compare their weights."""
    write_job(Job("simple", ("simple_ddp.py", "--no-cuda"), time="5", **shape), LOCAL, folder)
    scripts.write_script("simple_ddp", folder / "simple_ddp.py")


def test_torchrun_on_each_node_makes_one_world_of_four_ranks_in_a_folder_with_spaces(cluster, tmp_path, capsys):
    folder = tmp_path / "a run; #1"
    write_simple(folder, nodes=2, ranks_per_node=2, gpus_per_node=2, launcher="torchrun")
    number = submit(folder)
    watch(folder)
    shown = capsys.readouterr().out
    [run] = collect(folder)
    assert run.state == "done, no record", "\n".join(log_of(folder, number)[-10:])
    for rank in range(4):
        hello = f"Hello from rank {rank} of 4, local rank {rank % 2}, started by torchrun"
        assert hello in rank_lines(folder, rank) and f"[rank {rank}]\x1b[0m {hello}" in shown
    assert "all 4 ranks hold the same model" in rank_lines(folder, 0)


# ---- without a Slurm


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    """No command of Slurm's is found."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def test_without_slurm_the_same_job_runs_under_torchrun_and_says_so(no_slurm, tmp_path, capsys):
    folder = tmp_path / "a run"
    write_simple(folder, ranks_per_node=2)
    assert submit(folder) == "" and "torchrun" in capsys.readouterr().out.splitlines()[0]
    watch(folder)
    [run] = collect(folder)
    assert (run.job["state"], run.job["job_id"], run.job["source"]) == ("COMPLETED", None, "torchrun")
    assert run.job["seconds"] >= 0 and collect(folder) == [run]
    assert "all 2 ranks hold the same model" in rank_lines(folder, 0)
    refused(submit, folder, named=["already"])


def test_without_slurm_more_ranks_than_a_machine_can_hold_are_refused(no_slurm, tmp_path):
    write_simple(tmp_path / "run", nodes=50, ranks_per_node=99)
    refused(submit, tmp_path / "run", named=["4950 ranks"])


def test_without_slurm_the_tasks_of_an_array_run_one_after_the_other_each_with_its_own_end(no_slurm, tmp_path):
    folder = tmp_path / "run"
    write_job(Job("try", ("-m", "program", "{array}"), array=("good", "bad")), LOCAL, folder)
    (folder / "program.py").write_text(
        "import os, sys\nprint(sys.argv[1], os.getcwd())\nsys.exit(sys.argv[1] == 'bad')"
    )
    submit(folder)
    good, bad = collect(folder)
    assert (good.job["state"], bad.job["state"], bad.state) == ("COMPLETED", "FAILED", "failed")
    assert rank_lines(good.folder, 0) == [f"good {folder}"]  # in the job's folder, as under Slurm
    assert list(runs.table(tmp_path)["run"]) == ["run-0", "run-1"]
