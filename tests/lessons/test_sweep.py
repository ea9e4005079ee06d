"""A sweep is killed and started again: each configuration runs once. And many records become one table."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from real import LIMIT, until
from refusals import one_line, refused

from ddp_helpers import ROOT, RUNS, jobs
from ddp_helpers.jobs import queue
from ddp_helpers.lessons.sweep_the_cluster import sweep as sweep_the_cluster
from ddp_helpers.records import runs

RUN = """
import json, sys
from ddp_helpers.lessons.sweep_the_cluster.sweep import sweep
print(sweep(json.loads(sys.argv[1])))
"""


@pytest.fixture
def configurations(digits):
    """Two tiny configurations, in run folders that are removed at the end."""
    name = f"test-sweep-{time.time_ns()}"
    common = {"gpus_per_node": 1, "epochs": 1, "batch_size": 256, "data": str(digits), "time": "5"}
    yield [common | {"run": f"{name}-{seed}", "seed": seed} for seed in (1, 2)]
    for folder in RUNS.glob(f"{name}*"):
        if number := runs.read_run(folder).job.get("job_id"):
            jobs.cancel(number)
        shutil.rmtree(folder)


def start(configurations):
    """Start a sweep in a Python of its own, outside any notebook."""
    command = [sys.executable, "-c", RUN, json.dumps(configurations)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)


def running(folder):
    """The id of the job in this folder, if it runs now."""
    number = runs.read_run(folder).job.get("job_id")
    return number if number and jobs.states_of_job(number)[0].state == "RUNNING" else None


def log_of_completed(run):
    """What Slurm knows of the jobs of this name, whatever came behind it, a line each."""
    lines = queue.run_slurm("scontrol", "show", "job", "--oneliner").stdout.splitlines()
    return [line for line in lines if re.search(rf" JobName={re.escape(run)}(-try\d+)? ", line)]


def test_a_sweep_that_is_killed_and_started_again_runs_each_configuration_once(cluster, configurations):
    first, second = (RUNS / each["run"] for each in configurations)
    second.mkdir(parents=True)  # an attempt that failed: it stays, and the configuration runs again
    (second / "job.json").write_text(json.dumps({"job": {}, "job_id": None, "state": "FAILED", "site": "local"}))
    (second / "status.json").write_text(json.dumps({"state": "failed", "why": "meant to"}))
    failed = {path.name: path.read_bytes() for path in second.iterdir()}
    child, kernels = start(configurations), []
    try:
        number = until(lambda: running(first), "the first job runs")
        assert child.poll() is None and runs.read_run(first).state != "done"
        kernels = psutil.Process(child.pid).children(recursive=True)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    again = start(configurations)
    out, _ = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, out[-2000:]
    repeated = second.with_name(f"{second.name}-try2")
    for folder in (first, repeated):
        run = runs.read_run(folder)
        assert (run.state, run.job["state"], run.env["world_size"]) == ("done", "COMPLETED", 1)
        assert run.job["job_id"] == run.env["job_id"] and run.job["seconds"] > 0 and not run.problems
        assert len(log_of_completed(folder.name)) == 1
    assert runs.read_run(first).job["job_id"] == number
    assert {path.name: path.read_bytes() for path in second.iterdir()} == failed
    mine = sorted(RUNS.glob(f"{first.name[:-2]}*"))
    assert mine == [first, second, repeated]
    assert kernels and not psutil.wait_procs(kernels, timeout=LIMIT)[1]  # and nothing of the killed one is left
    # A third time there is nothing to do, and all is shown.
    before = {folder: (folder / "job.json").read_text() for folder in mine}
    table = sweep_the_cluster.sweep(configurations)
    assert list(table["state"]) == ["done"] * 2 and list(table.index) == [first.name, repeated.name]
    assert {folder: (folder / "job.json").read_text() for folder in mine} == before


@pytest.mark.parametrize("wrong", [{"node": 2}, {"run": ""}, {"run": "a"}])
def test_a_sweep_with_a_wrong_configuration_is_refused_before_anything_runs(wrong, monkeypatch):
    ran = []
    monkeypatch.setattr(sweep_the_cluster, "_run", ran.append)
    good = {"run": "a", "nodes": 1}
    line = refused(sweep_the_cluster.sweep, [good, good | {"run": "b"} | wrong])
    assert not ran and re.search(r" nodes\?|`run`", line)
    refused(sweep_the_cluster.sweep, [{"nodes": 1}], named=["`run`"])
    sweep_the_cluster.sweep([good, good | {"run": "b"}])
    assert [configuration["run"] for configuration in ran] == ["a", "b"]


def test_a_run_that_is_done_but_forgotten_by_slurm_is_not_repeated(tmp_path, monkeypatch):
    record(tmp_path / "a", {"state": "PENDING", "job_id": "5"}, "done")
    record(tmp_path / "b", {"state": "PENDING", "job_id": "6"}, "running")
    record(tmp_path / "a-7", None, "failed")  # submitted by hand, or another's: no attempt of a
    monkeypatch.setattr(sweep_the_cluster, "RUNS", tmp_path)
    monkeypatch.setattr(sweep_the_cluster, "execute", lambda *_, **__: pytest.fail("it ran again"))
    monkeypatch.setattr(jobs, "states_of_job", forget)
    sweep_the_cluster._run({"run": "a"})
    with pytest.raises(jobs.JobError, match="job 6 is not known"):
        sweep_the_cluster._run({"run": "b"})


def test_a_run_folder_of_other_values_is_refused_and_a_half_written_notebook_is_no_obstacle(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(sweep_the_cluster, "RUNS", tmp_path)
    monkeypatch.setattr(sweep_the_cluster, "_run", ran.append)
    (tmp_path / "a").mkdir()
    parameters = {"run": "a-try2", "nodes": 1}
    (tmp_path / "a" / "job.ipynb").write_text(json.dumps({"metadata": {"papermill": {"parameters": parameters}}}))
    refused(sweep_the_cluster.sweep, [{"run": "a", "nodes": 2}], named=["run a ", "nodes was 1, now 2", "name"])
    assert not ran
    sweep_the_cluster.sweep([{"run": "a", "nodes": 1}])
    for half in ('{"metadata": {"pape', "", "{}"):
        (tmp_path / "a" / "job.ipynb").write_text(half)
        sweep_the_cluster.sweep([{"run": "a", "nodes": 2}])
    assert len(ran) == 4


def forget(number):
    """What look does when nobody knows the job."""
    raise jobs.JobError(f"job {number} is not known to Slurm")


# ---- many records as one table


def record(folder, job, status, lines=('{"epoch": 1}',), ranks=2):
    """A small run record."""
    folder.mkdir(parents=True)
    where = [{"rank": rank, "local_rank": rank, "host": "h", "device": "cpu", "chip": "chip"} for rank in range(ranks)]
    parts = {"spec": {"batch_size": 64, "seed": 1}, "env": {"world_size": ranks, "ranks": where}, "job": job}
    for name, content in (parts | {"status": {"state": status}}).items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_a_table_has_the_tasks_of_an_array_and_not_their_parent(tmp_path):
    asked = {"array": ["1", "2"], "cpus_per_task": 3}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "job.json").write_text(json.dumps({"job": asked, "job_id": "10", "state": "PENDING"}))
    for task in ("0", "1"):
        ended = {
            "job": asked,
            "job_id": f"1{task}",
            "task": task,
            "state": "COMPLETED",
            "seconds": 4.0,
            "site": "local",
        }
        record(tmp_path / f"a-{task}", ended, "done")
    table = runs.table(tmp_path)
    assert list(table["run"]) == ["a-0", "a-1"] and list(table["state"]) == ["done"] * 2
    assert list(table["cpus_per_task"]) == [3, 3] and list(table["job_seconds"]) == [4.0, 4.0]


HALF = '{"epoch": 2, "train_lo'


@pytest.mark.parametrize("bad", [HALF, '{"epoch": "2"}', "[1]", "{}", "null", "\ufffd", '"epoch"'])
def test_a_line_that_is_half_written_is_named_and_left_out(bad, tmp_path, capsys):
    record(tmp_path / "a", None, "failed", ['{"epoch": 1, "test_accuracy": 0.5}', bad, '{"epoch": 3}'])
    table = runs.table(tmp_path)
    assert list(table["epoch"]) == [1, 3] and list(table["state"]) == ["failed"] * 2
    one_line(capsys.readouterr().err, "a: metrics.jsonl line 2: ")


ENDS = {"FAILED": "failed", "CANCELLED": "cancelled", "TIMEOUT": "timed out", "NODE_FAIL": "failed"}
ENDS |= {"OUT_OF_MEMORY": "out of memory", "COMPLETED": "running", "PENDING": "running"}


@pytest.mark.parametrize(("word", "state"), ENDS.items())
def test_what_slurm_says_of_the_end_is_the_state_and_a_run_without_an_epoch_is_seen(word, state, tmp_path, capsys):
    record(tmp_path / "a", {"state": word, "job_id": "1"}, "running", lines=())
    table = runs.table(tmp_path)
    assert list(table["state"]) == [state] and list(table["world_size"]) == [2] and "epoch" not in table
    assert not capsys.readouterr().err


def test_a_record_whose_files_are_broken_is_named_and_the_others_are_read(tmp_path, capsys):
    record(tmp_path / "a", {"state": "COMPLETED"}, "done")
    record(tmp_path / "b", {"state": "COMPLETED"}, "done")
    (tmp_path / "b" / "env.json").write_text('{"world')
    (tmp_path / "b" / "job.json").write_text("[]")
    (tmp_path / "b" / "metrics.jsonl").write_bytes(b'\xff\xfe{"epoch": 1}\n')
    table = runs.table(tmp_path)
    assert list(table["run"]) == ["a", "b"] and list(table["state"]) == ["done", "done"]
    problems = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in problems] == ["b"] * 3
    assert [word for line in problems for word in ("env", "job", "metrics") if f" {word}." in line] == [
        "env",
        "job",
        "metrics",
    ]
