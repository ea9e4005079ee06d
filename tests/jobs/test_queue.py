"""Jobs without torch on a real Slurm: submitted, refused, watched, cancelled, timed out, collected, forgotten."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
from real import until
from refusals import refused

from ddp_helpers.jobs import (
    Job,
    JobError,
    Site,
    available,
    cancel,
    collect,
    queue,
    states_of_job,
    submit,
    watch,
    write_job,
)
from ddp_helpers.records import runs

LOCAL = Site.load("local")
pytestmark = pytest.mark.usefixtures("cluster")


def test_a_limit_of_a_qos_is_not_taken_for_a_wrong_account(tmp_path, monkeypatch):
    complaint = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    said = f"sbatch: error: Batch job submission failed: {complaint}\n"
    monkeypatch.setattr(queue, "run_slurm", lambda *words, **_: subprocess.CompletedProcess(words, 1, "", said))
    with pytest.raises(JobError, match=r"time limits\): wait until"):
        queue.send(tmp_path / "job.sbatch")


@pytest.fixture
def job(tmp_path):
    """Write a job that runs this program into a folder; it is cancelled at the end."""
    folders = []

    def make(code, *args, folder="run", site=LOCAL, **options):
        folders.append(tmp_path / folder)
        write_job(Job(tmp_path.name, ("program.py", *args, "{run_dir}"), **options), site, folders[-1])
        (folders[-1] / "program.py").write_text(code)
        return folders[-1]

    yield make
    for folder in folders:
        if number := number_of(folder):
            cancel(number)


def number_of(folder):
    """The id that Slurm gave to the job in this folder."""
    return json.loads((folder / "job.json").read_text())["job_id"]


def queued(folder):
    """Whether a job of this folder waits or runs."""
    return bool(queue.run_slurm("squeue", "--noheader", f"--name={folder.parent.name}").stdout)


def ended(folder):
    """Wait for the end of the job in this folder, and collect it."""
    until(lambda: not any(state.active for state in states_of_job(number_of(folder))), f"{folder.name} ends")
    return collect(folder)


@pytest.fixture(scope="module")
def late(cluster, tmp_path_factory):
    """A job whose time is up, as Slurm notices within half a minute: it is collected by the last test here."""
    folder = tmp_path_factory.mktemp("late") / "run"
    write_job(Job("late", ("program.py", "{run_dir}"), time="1"), LOCAL, folder)
    (folder / "program.py").write_text("import time\nprint('its last word', flush=True)\ntime.sleep(300)")
    number = submit(folder)
    until(lambda: "its last word" in "".join(path.read_text() for path in folder.glob("*.log")), "it runs")
    queue.run_slurm("scontrol", "update", f"JobId={number}", "EndTime=now+1")  # a limit in Slurm is a minute at least
    yield folder
    cancel(number)


# ---- submitting

ODD = "a run (1), 100% %j $(touch canary); `x` & #1  # é JobState=FAILED *?[a]{a,b}!x|b>c<d ~ -rf"
SAYS = """
import json, os, pathlib, sys
mine = {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "SBATCH", "PM", "OMPI", "RANK"))}
said = {"state": "done", "argv": sys.argv[1:], "env": mine}
(pathlib.Path(sys.argv[-1]) / "status.json").write_text(json.dumps(said))
print("said by rank", os.environ["SLURM_PROCID"], end="")
"""
LEAKS = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SLURM_MEM_PER_NODE": "1", "SBATCH_MEM_BIND": "nope", "RANK": "3"}
LEAKS |= {"PMI_RANK": "3", "PMIX_RANK": "3", "OMPI_COMM_WORLD_RANK": "3", "SLURM_CPUS_PER_TASK": "5"}


def test_inside_another_allocation_and_in_an_odd_folder_a_job_is_a_job_of_its_own(late, job, monkeypatch, capsys):
    folder = job(SAYS, "$(touch canary) 'x'", folder=ODD, cpus_per_rank=2)
    for name, value in LEAKS.items():
        monkeypatch.setenv(name, value)
    direct = subprocess.run(["sbatch", folder / "job.sbatch"], capture_output=True, text=True, check=False)
    assert direct.returncode and "unrecognized --mem-bind" in direct.stderr, "the control: these variables count"
    number = submit(folder)
    watch(folder)
    [run] = collect(folder)
    assert "said by rank 0" in capsys.readouterr().out  # a last line without an end, too
    assert run.state == "done" and (run.job["state"], run.job["exit_code"]) == ("COMPLETED", "0:0")
    assert run.status["argv"] == ["$(touch canary) 'x'", str(folder)]
    env = run.status["env"]
    assert (env["SLURM_JOB_ID"], env["SLURM_NTASKS"], env["SLURM_CPUS_PER_TASK"]) == (number, "1", "2")
    assert not {"SBATCH_MEM_BIND", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "RANK"} & {*env}
    files = {"job.json", "job.sbatch", "program.py", f"slurm-{number}.log", "status.json", "claim", "submitted"}
    assert {path.name for path in folder.iterdir()} == files and [*folder.parent.iterdir()] == [folder]
    before = (folder / "job.json").read_text()
    assert collect(folder) == [run] and (folder / "job.json").read_text() == before
    refused(submit, folder, named=[number])


REFUSED = [
    ({"sbatch": ("--partition=nope",)}, "invalid partition specified: nope", "change `--partition`"),
    ({"sbatch": ("--constraint=a100&gpu80",)}, "Invalid feature specification", "change `--constraint`"),
    ({"ranks_per_node": 9, "gpus_per_node": 9}, "Requested node configuration is not available", "fewer nodes, GPUs"),
    ({"nodes": 99}, "More processors requested than permitted", "fewer nodes, GPUs"),
    ({"time": "5-0"}, "Requested time limit is invalid", "less `time`"),
    ({"sbatch": ("--mem=900T",)}, "Memory specification can not be satisfied", "less"),
]


@pytest.mark.parametrize(("options", "words", "cure"), REFUSED)
def test_what_the_cluster_refuses_gets_slurms_own_words_and_a_cure(options, words, cure, job):
    folder = job("", **options)
    refused(submit, folder, named=[words, cure])
    assert number_of(folder) is None and runs.read_run(folder).job["state"] == "WRITTEN" and not queued(folder)
    refused(collect, folder, named=["submitted"])


def test_of_equal_options_the_job_counts_more_than_its_site_and_its_shape_more_than_both(job):
    site = Site("here", sbatch=("--partition=nope", "--nodes=7", "--comment=site"))
    folder = job(WAITS, site=site, sbatch=("--comment=one", "--comment=a b #2", "--partition=course", "--time=1"))
    fields = queue.run_slurm("scontrol", "show", "job", submit(folder)).stdout
    for field in ("Partition=course", "Comment=a b #2", "NumNodes=1", "TimeLimit=00:10:00"):
        assert field in fields
    assert queued(folder), "the control: a job is found"


# ---- in the queue

WAITS = """
import pathlib, time
print("it is there", flush=True)
while not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.1)
"""


class Shown(io.StringIO):
    """What is shown, and what is done as soon as these words are: nobody can know how long that takes."""

    def __init__(self, **actions):
        super().__init__()
        self.actions = actions

    def write(self, text):
        written = super().write(text)
        for words in [words for words in self.actions if words in self.getvalue()]:
            self.actions.pop(words)()
        return written


def test_a_job_is_seen_to_wait_with_its_reason_then_to_run_and_to_end(job, capsys):
    first = job(WAITS, folder="first", nodes=2, ranks_per_node=2, gpus_per_node=2)
    second = job(WAITS, folder="second", nodes=2, ranks_per_node=2, gpus_per_node=2)
    submit(first)
    number = submit(second)
    line = refused(collect, first, named=[number_of(first)])
    assert re.search("pending|running", line)
    assert "seconds" not in runs.read_run(first).job
    capsys.readouterr()
    shown = Shown(**{": pending (": (first / "go").touch, ": running on ": (second / "go").touch})
    with redirect_stdout(shown):
        watch(second)
    lines = shown.getvalue().splitlines()
    queued = [line for line in lines if line.startswith(f"job {number}: ")]
    kinds = list(dict.fromkeys(re.match(r"job \d+: (\w+)", line)[1] for line in queued))
    assert [kind for kind in kinds if kind != "completing"] == ["pending", "running", "COMPLETED"]
    assert re.search(rf"job {number}: pending \((Resources|Priority)\)", "\n".join(queued))
    assert re.fullmatch(rf"job {number}: COMPLETED after \d+ s, exit code 0:0, on node\[1-2\]", queued[-1])
    said = [line for line in lines if "it is there" in line]
    assert sorted(re.search(r"\[rank (\d)\]", line)[1] for line in said) == list("0123")


def interrupt():
    """What Ctrl-C does; a signal would do nothing where the tests run in the background."""
    raise KeyboardInterrupt


def test_a_watch_that_is_interrupted_leaves_the_job_which_can_be_cancelled(job):
    folder = job(WAITS)
    number = submit(folder)
    shown = Shown(**{"it is there": interrupt})
    with redirect_stdout(shown), pytest.raises(KeyboardInterrupt):
        watch(folder)
    assert f"cancel('{number}')" in shown.getvalue(), "how to end it"
    assert states_of_job(number)[0].state == "RUNNING"
    cancel(number)
    [run] = ended(folder)
    assert run.state == "cancelled" and run.job["state"] == "CANCELLED"
    cancel(number)  # again, which changes nothing
    assert collect(folder) == [run]
    refused(cancel, "nowhere", named=["nowhere", "Invalid job id"])
    refused(states_of_job, "999999999", named=["999999999"])


# ---- arrays

MEETS = """
import json, os, pathlib, socket, sys, time
folder, port = pathlib.Path(sys.argv[-1]), int(os.environ["MASTER_PORT"])
with socket.create_server((os.environ["MASTER_ADDR"], port)):
    said = {"state": "done", "value": sys.argv[1], "port": port, "node": os.environ["SLURMD_NODENAME"]}
    (folder / "here").touch()
    while len(list(folder.parent.glob("run-[0-2]/here"))) < 3:  # all at the same time, or never
        time.sleep(0.05)
(folder / "status.json").write_text(json.dumps(said))
(folder / "metrics.jsonl").write_text(json.dumps({"epoch": 1}) + "\\n")
"""


def test_three_tasks_of_an_array_run_at_the_same_time_on_one_node_each_with_its_port_and_its_record(job, tmp_path):
    folder = job(MEETS, "{array}", array=("0.1", "-2", "1e-3"), sbatch=("--nodelist=node1",))
    number = submit(folder)
    records = ended(folder)
    assert [run.folder.name for run in records] == ["run-0", "run-1", "run-2"]
    assert [run.state for run in records] == ["done"] * 3
    assert [run.status["value"] for run in records] == ["0.1", "-2", "1e-3"]
    assert len({run.status["port"] for run in records}) == 3 and len({run.status["node"] for run in records}) == 1
    assert len({run.job["job_id"] for run in records}) == 3 and [run.job["task"] for run in records] == list("012")
    before = sorted(tmp_path.iterdir())
    assert collect(folder) == records and collect(records[1].folder) == [records[1]]
    assert sorted(tmp_path.iterdir()) == before == [folder, *(run.folder for run in records)]
    table = runs.table(tmp_path)
    assert list(table["run"]) == ["run-0", "run-1", "run-2"] and number_of(folder) == number


def test_an_array_that_is_cancelled_before_it_starts_is_cancelled_task_by_task(job):
    keeps = job(WAITS, folder="keeps", nodes=2, ranks_per_node=2, gpus_per_node=2)
    folder = job("", "{array}", array=("a", "b", "c"), ranks_per_node=1, gpus_per_node=1)
    keeper = submit(keeps)
    until(lambda: states_of_job(keeper)[0].state == "RUNNING", "a job that has both nodes")
    number = submit(folder)
    states = states_of_job(number)
    assert [state.task for state in states] == list("012") and {state.state for state in states} == {"PENDING"}
    cancel(number)
    assert [(run.folder.name, run.state) for run in ended(folder)] == [(f"run-{task}", "cancelled") for task in "012"]
    assert queue.tasks_of(queue.State("1", "PENDING", task="[0-1,5,7-8%2]"))[-1].task == "8"
    assert [one.task for one in queue.tasks_of(queue.State("1", "RUNNING", task="4"))] == ["4"]
    assert [one.task for one in queue.tasks_of(queue.State("1", "RUNNING"))] == [""]


# ---- where Slurm has forgotten, or is not


def test_accounting_is_read_where_a_cluster_has_it(tmp_path, monkeypatch):
    rows = "12|CANCELLED by 1000|None|0:15|n[1-2]|2026-01-01T00:00:00|2026-01-01T00:00:02|2026-01-01T00:00:05|11_2"
    (tmp_path / "sacct").write_text(f"#!/bin/sh\necho '{rows}'\n")
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    [state] = queue.accounting("11")
    assert (state.job_id, state.state, state.task, state.nodes) == ("12", "CANCELLED", "2", "n[1-2]")
    assert (state.record()["queue_seconds"], state.record()["seconds"], state.source) == (2, 3, "sacct")


def test_a_machine_without_slurm_is_told_from_one_with_it(monkeypatch, tmp_path):
    assert available()
    with monkeypatch.context() as without:
        without.setenv("SLURM_CONF", str(tmp_path / "none"))
        assert not available()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not available()
    refused(states_of_job, "1", named=["scontrol"])


def test_a_job_whose_time_is_up_is_timed_out(late, capsys):
    [run] = ended(late)
    assert run.state == "timed out" and run.job["state"] == "TIMEOUT"
    out = capsys.readouterr().out
    assert "TIMEOUT after" in out and "its last word" in out and "DUE TO TIME LIMIT" in out
    assert sys.executable not in out
