"""A sweep is killed and started again: each configuration runs once."""

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
from refusals import refused
from run_folders import write_run

from ddp_helpers import ROOT, RUNS, jobs
from ddp_helpers.jobs import queue
from ddp_helpers.jobs import sweep as sweep_the_cluster
from ddp_helpers.launch.processes import is_alive
from ddp_helpers.records import runs

RUN = """
import json, sys
from ddp_helpers.jobs.sweep import sweep
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


def log_of_completed(run):
    """What Slurm knows of the jobs of this name, whatever came behind it, a line each."""
    lines = queue.run_slurm("scontrol", "show", "job", "--oneliner").stdout.splitlines()
    return [line for line in lines if re.search(rf" JobName={re.escape(run)}(-try\d+)? ", line)]


def test_a_sweep_that_is_killed_and_started_again_runs_each_configuration_once(cluster, configurations):
    first, second = (RUNS / each["run"] for each in configurations)
    # An attempt that failed: it stays, and the configuration runs again.
    job = {"job": {}, "job_id": None, "state": "FAILED", "site": "local"}
    write_run(second, (), job=job, status={"state": "failed", "why": "meant to"})
    failed = {path.name: path.read_bytes() for path in second.iterdir()}
    child, kernels = start(configurations), []
    try:
        number = until(lambda: runs.read_run(first).job.get("job_id"), "the first job is submitted")
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
    assert kernels
    until(lambda: not any(map(is_alive, kernels)), "nothing of the killed one is left")
    # A third time there is nothing to do, and all is shown.
    before = {folder: (folder / "job.json").read_text() for folder in mine}
    table = sweep_the_cluster.sweep(configurations)
    assert list(table["state"]) == ["done"] * 2 and list(table.index) == [first.name, repeated.name]
    assert {folder: (folder / "job.json").read_text() for folder in mine} == before


def test_a_sweep_with_a_wrong_configuration_is_refused_before_anything_runs(monkeypatch):
    ran = []
    monkeypatch.setattr(sweep_the_cluster, "_run", ran.append)
    good = {"run": "a", "nodes": 1}
    for wrong, named in (({"node": 2}, " nodes?"), ({"run": ""}, "`run`"), ({"run": "a"}, "`run`")):
        refused(sweep_the_cluster.sweep, [good, good | {"run": "b"} | wrong], named=[named])
    refused(sweep_the_cluster.sweep, [{"nodes": 1}], named=["`run`"])
    assert not ran
    sweep_the_cluster.sweep([good, good | {"run": "b"}])
    assert [configuration["run"] for configuration in ran] == ["a", "b"]


def test_a_run_that_is_done_but_forgotten_by_slurm_is_not_repeated(tmp_path, monkeypatch):
    def forget(number):
        raise jobs.JobError(f"job {number} is not known to Slurm")

    write_run(tmp_path / "a", job={"state": "PENDING", "job_id": "5"}, status={"state": "done"})
    write_run(tmp_path / "b", job={"state": "PENDING", "job_id": "6"}, status={"state": "running"})
    write_run(tmp_path / "a-7", status={"state": "failed"})  # submitted by hand, or another's: no attempt of a
    monkeypatch.setattr(sweep_the_cluster, "RUNS", tmp_path)
    monkeypatch.setattr(sweep_the_cluster, "execute", lambda *_, **__: pytest.fail("it ran again"))
    monkeypatch.setattr(sweep_the_cluster, "states_of_job", forget)
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
