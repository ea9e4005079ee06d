"""The course's job on a real Slurm, from papermill's command line to its record; and the same without a Slurm."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real import LIMIT, until
from refusals import one_line, refused

from ddp_helpers import ROOT, RUNS
from ddp_helpers.jobs import Job, Site, cancel, collect, queue, rank_lines, states_of_job, submit, watch, write_job
from ddp_helpers.jobs.files import log_of
from ddp_helpers.jobs.parameters import execute
from ddp_helpers.launch import scripts
from ddp_helpers.records import runs

JOB = ROOT / "slurm" / "job.ipynb"


@pytest.fixture
def name():
    """The name of a run below runs/, where job.ipynb puts it: a number, as papermill takes it. Removed at the end."""
    number = str(time.time_ns())
    yield number
    for folder in RUNS.glob(f"{number}*"):
        shutil.rmtree(folder)


def papermill(tmp_path, *args):
    """Start papermill as a learner would, from somewhere else."""
    command = [str(Path(sys.executable).with_name("papermill")), str(JOB), str(tmp_path / "out.ipynb"), *args]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def mnist(folder, digits, site="local", **shape):
    """A short training of the course's own script, written into a folder."""
    program = ("mnist_ddp.py", "--epochs", "1", "--data", str(digits), "--no-cuda", "--run-dir", "{run_dir}")
    write_job(Job("mnist", program, time="5", **shape), Site.load(site), folder)
    scripts.write_script("mnist_ddp", folder / "mnist_ddp.py")


def test_papermill_runs_a_job_on_two_nodes_and_its_file_runs_by_hand(cluster, tmp_path, digits, name, monkeypatch):
    monkeypatch.setenv("DDP_MNIST_ROOT", str(digits))
    folder = RUNS / name
    given = {"nodes": 2, "gpus_per_node": 1, "epochs": 1, "time": 5, "run": name, "batch_size_per_rank": 16}
    child = papermill(tmp_path, *(word for key, value in given.items() for word in ("-p", key, str(value))))
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0, out[-2000:]
    run = runs.read_run(folder)
    assert run.state == "done" and run.job["state"] == "COMPLETED" and run.job["exit_code"] == "0:0"
    assert (run.env["launcher"], run.env["world_size"]) == ("slurm", 2)
    assert [rank["local_rank"] for rank in run.env["ranks"]] == [0, 0] and run.nodes == 2
    assert [epoch["epoch"] for epoch in run.epochs] == [1] and not run.problems
    assert run.env["job_id"] == run.job["job_id"] == json.loads((folder / "job.json").read_text())["job_id"]
    row = runs.table(folder).iloc[0]
    assert (row["launcher"], row["nodes"], row["site"], row["state"]) == ("slurm", 2, "local", "done")
    assert (row["scaling"], row["batch_per_rank"], row["global_batch"]) == ("weak", 16, 32)
    assert {"job.sbatch", "mnist_ddp.py"} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]  # nothing where papermill was started
    # By hand, as it stands there.
    before = {path: path.read_bytes() for path in folder.iterdir()}
    number = queue.run_slurm("sbatch", "--parsable", "job.sbatch", cwd=folder).stdout.strip()
    wait(number)
    again = runs.read_run(folder.with_name(f"{name}-{number}"))
    assert again.state == "done" and again.env["world_size"] == 2 and again.env["job_id"] == number
    assert {path: path.read_bytes() for path in folder.iterdir() if path in before} == before
    assert {path.name for path in folder.iterdir()} == {path.name for path in before} | {f"slurm-{number}.log"}


def wait(number):
    """Wait for a job's end."""
    try:
        until(lambda: not any(state.active for state in states_of_job(number)), f"job {number} ends")
    finally:
        cancel(number)  # nothing, once it has ended


def test_torchrun_on_each_node_makes_one_world_of_four_ranks_in_a_folder_with_spaces(cluster, tmp_path, digits, capsys):
    folder = tmp_path / "a run; #1"
    mnist(folder, digits, nodes=2, tasks_per_node=2, gpus_per_node=2, launcher="torchrun")
    number = submit(folder)
    watch(folder)
    shown = capsys.readouterr().out
    [run] = collect(folder)
    assert run.state == "done", "\n".join(log_of(folder, number)[-10:])
    assert (run.env["launcher"], run.env["world_size"]) == ("torchrun", 4)
    assert [rank["local_rank"] for rank in run.env["ranks"]] == [0, 1, 0, 1] and run.nodes == 2
    [line] = [line for line in rank_lines(folder, 0) if line.startswith("epoch 1: ")]
    assert f"[rank 0]\x1b[0m {line}" in shown and not [line for line in rank_lines(folder, 3) if "epoch 1: " in line]


def submitted_jobs():
    """Every job that the cluster knows."""
    return queue.run_slurm("squeue", "--noheader", "--states=all", "--format=%A").stdout.split()


def test_a_parameter_that_the_job_does_not_have_gets_one_line_and_nothing_is_submitted(cluster, tmp_path, name):
    before, folders = submitted_jobs(), sorted(RUNS.glob("*"))
    child = papermill(tmp_path, "-p", "node", "2", "-p", "run", name)
    out, _ = child.communicate(timeout=LIMIT)
    line = "job.ipynb has no parameter 'node': did you mean nodes?"
    assert child.returncode == 1 and out.strip().splitlines()[-1] == f"JobError: {line}", out[-600:]
    for wrong, hint in {"node": " nodes?", "zzz": "run, script, site,"}.items():
        words = {wrong: 2, "run": name}
        refused(execute, JOB, tmp_path / "executed.ipynb", **words, named=["job.ipynb", repr(wrong), hint])
    assert submitted_jobs() == before and sorted(RUNS.glob("*")) == folders
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]


def test_a_value_that_a_job_cannot_have_gets_one_line_and_nothing_is_submitted(cluster, tmp_path, name):
    before = submitted_jobs()
    values = {"nodes": 0, "run": name, "data": str(tmp_path)}
    refused(execute, JOB, tmp_path / "executed.ipynb", **values, named=["job.ipynb", "JobError", "nodes=0"])
    assert submitted_jobs() == before and not (RUNS / name).exists()


def test_a_job_that_slurm_refuses_leaves_no_run_folder(cluster, tmp_path, digits, name):
    values = {"sbatch": "--partition=nowhere", "run": name, "data": str(digits)}
    refused(execute, JOB, tmp_path / "executed.ipynb", **values, named=["job.ipynb", "JobError", "partition"])
    assert not (RUNS / name).exists()


def test_without_slurm_the_same_job_runs_under_torchrun_and_says_so(tmp_path, digits, monkeypatch, capsys):
    folder = tmp_path / "a run"
    mnist(folder, digits, tasks_per_node=2)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert submit(folder) == ""
    out = capsys.readouterr().out
    assert "torchrun" in out.splitlines()[0]
    watch(folder)
    [run] = collect(folder)
    assert run.state == "done" and (run.env["launcher"], run.env["world_size"]) == ("torchrun", 2)
    assert (run.job["state"], run.job["job_id"], run.job["source"]) == ("COMPLETED", None, "torchrun")
    assert run.job["seconds"] > 0 and collect(folder) == [run]
    assert [line for line in rank_lines(folder, 0) if line.startswith("epoch 1: ")]
    refused(submit, folder, named=["already"])


def test_without_slurm_more_ranks_than_a_machine_can_hold_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_job(Job("try", ("-m", "program"), nodes=50, tasks_per_node=99), Site.load("local"), folder)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    refused(submit, folder, named=["4950 ranks"])


def test_without_slurm_the_tasks_of_an_array_run_one_after_the_other_each_with_its_own_end(tmp_path, monkeypatch):
    code = "import os, sys\nprint('value', sys.argv[2], os.getcwd())\nsys.exit(sys.argv[2] == 'bad')"
    folder = tmp_path / "run"
    write_job(Job("try", ("-m", "program", "{array}"), array=("good", "bad")), Site.load("local"), folder)
    (folder / "program.py").write_text(code.replace("argv[2]", "argv[1]"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    submit(folder)
    good, bad = collect(folder)
    assert (good.job["state"], bad.job["state"], bad.state) == ("COMPLETED", "FAILED", "failed")
    assert rank_lines(good.folder, 0) == [f"value good {folder}"]  # in the job's folder, as under Slurm
    assert list(runs.table(tmp_path)["run"]) == ["run-0", "run-1"]


def test_a_batch_file_that_forgot_srun_ends_with_a_line_and_trains_nothing(cluster, tmp_path, digits):
    """Alone it would train on one of the GPUs that the job holds, and end with 0."""
    script = scripts.write_script("mnist_ddp", tmp_path / "mnist_ddp.py")
    words = [sys.executable, script, "--data", digits, "--no-cuda", "--run-dir", tmp_path / "run"]
    shape = ["--partition=course", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path / 'log'}"]
    number = queue.run_slurm("sbatch", "--parsable", *shape, f"--wrap={shlex.join(map(str, words))}").stdout.strip()
    wait(number)
    [state] = states_of_job(number)
    assert (state.state, state.exit_code) == ("FAILED", "1:0") and not (tmp_path / "run").exists()
    one_line((tmp_path / "log").read_text(), "SLURM_NTASKS=4", "srun")
