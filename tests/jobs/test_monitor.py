"""What becomes of a run that is submitted twice, killed, requeued, or sent to a cluster that does not answer."""

import json
import os
import shlex
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import nbformat
import pytest
from real import LIMIT, THOROUGH, until
from refusals import one_line, refused

from ddp_helpers import ROOT, jobs
from ddp_helpers.cli import main
from ddp_helpers.jobs import queue
from ddp_helpers.rank.record import claim

LOCAL = partial(jobs.Site.load, "local")

# A script as the pages describe it: it notes the signal, votes, saves, writes REQUEUE_FILE, and leaves with 75.
SAVES = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist

heard = []
signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
rank, world_size = (int(os.environ[name]) for name in names)
dist.init_process_group("gloo", rank=rank, world_size=world_size)
folder = pathlib.Path(sys.argv[1])
begin = int((folder / "saved").read_text()) if (folder / "saved").exists() else 0
for step in range(begin, begin + 3 if begin else 10**9):
    ballot = torch.tensor(len(heard))
    dist.all_reduce(ballot, dist.ReduceOp.MAX)
    if ballot.item():
        if rank == 0:
            (folder / "saved").write_text(str(step))
            MARK
        dist.barrier()
        sys.exit(75)
    if rank == 0:
        (folder / "trains").touch()
    time.sleep(0.05)
print("to the end, from step", begin)
dist.barrier()
dist.destroy_process_group()
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
"""
MARK = 'pathlib.Path(os.environ["REQUEUE_FILE"]).touch()'

# Fails in its first attempt, and goes on from what that has left.
FAILS_ONCE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
first = not (folder / "metrics.jsonl").exists()
(folder / "spec.json").write_text("{}")
with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"epoch": 1 if first else 2}) + chr(10))
(folder / "status.json").write_text(json.dumps({"state": "failed" if first else "done"}))
sys.exit(first)
"""


@pytest.fixture
def job(tmp_path):
    """Write a job of a script with this text, and give its folder; all its jobs are cancelled at the end."""
    folder = tmp_path / "run"

    def make(text, **shape):
        path = tmp_path / "mine.py"
        path.write_text(text)
        jobs.prepare(path, ["{run_dir}"], LOCAL(), folder, **shape)
        return folder

    yield make
    for number in submitted(folder):
        jobs.cancel(number)


def submitted(folder):
    """The ids that the job's submissions have noted."""
    path = folder / "submitted"
    return list(dict.fromkeys(path.read_text().split())) if path.exists() else []


def by_hand(folder):
    """Submit a job file as a person does."""
    return queue.send(folder / "job.sbatch")


def end_of(number):
    """Wait for the end of a job, and give its state."""
    until(lambda: not any(state.active for state in jobs.states_of_job(number)), f"the end of job {number}")
    return jobs.states_of_job(number)[0].state


def warned_and_freed(folder, number):
    """Warn a job that trains, wait until it is in the queue again, free it from there, and give its log at its end."""
    until((folder / "trains").exists, "a step")
    assert queue.run_slurm("scancel", "--signal=USR2", number).returncode == 0
    until(lambda: jobs.states_of_job(number)[0].state == "PENDING", "the job in the queue again")
    assert "Restarts=1" in queue.run_slurm("scontrol", "show", "job", number).stdout
    time.sleep(2)  # a node refuses a job that it has ended within the same second
    jobs.start_now(number)
    assert end_of(number) == "COMPLETED"
    log = (folder / f"slurm-{number}.log").read_text()
    assert log.count(f"to the end, from step {(folder / 'saved').read_text()}") == 2


@pytest.mark.parametrize("launcher", ["srun"] + ["torchrun"] * THOROUGH)
def test_a_script_that_saves_when_it_is_warned_and_says_so_is_requeued_and_goes_on(launcher, cluster, job):
    folder = job(SAVES.replace("MARK", MARK), nodes=2, requeue=True, launcher=launcher)
    warned_and_freed(folder, jobs.submit(folder))
    assert not list(folder.glob("requeue-*"))


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """Submit the job file that a cell of notebook 11 writes, with a script behind it; it is cancelled at the end."""
    monkeypatch.chdir(tmp_path)
    cells = nbformat.read(ROOT / "notebooks" / "11_survive_preemption.ipynb", as_version=4).cells
    [text] = [cell.source for cell in cells if cell.source.startswith("%%writefile job.sbatch\n")]
    [other] = [cell.source for cell in cells if 'Path("job_torchrun.sbatch")' in cell.source]
    Path("job.sbatch").write_text(text.partition("\n")[2])
    exec(other, {"Path": Path})
    Path("mine.py").write_text(SAVES.replace("MARK", MARK))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    numbers = []

    def submit(file):
        done = queue.run_slurm("sbatch", "--parsable", "--output=slurm-%j.log", file, "mine.py", ".")
        numbers.append(done.stdout.strip())
        return numbers[-1]

    yield submit
    for number in numbers:
        jobs.cancel(number)


@pytest.mark.parametrize("file", ["job_torchrun.sbatch"] + ["job.sbatch"] * THOROUGH)
def test_the_job_files_that_notebook_11_writes_do_the_same(file, cluster, printed, tmp_path):
    warned_and_freed(tmp_path, printed(file))


def test_a_job_of_notebook_11_that_is_cancelled_stays_ended(cluster, printed, tmp_path):
    """Even if its ranks have asked for a requeue just before: the control of the test above."""
    number = printed("job.sbatch")
    until((tmp_path / "trains").exists, "a step")
    (tmp_path / f"requeue-{number}-0").touch()  # as by ranks that were told just before
    jobs.cancel(number)
    assert end_of(number) == "CANCELLED"
    time.sleep(3)  # in which it would be requeued
    assert jobs.states_of_job(number)[0].state == "CANCELLED"


def test_a_script_that_does_not_say_so_is_not_requeued(cluster, job):
    folder = job(SAVES.replace("MARK", "pass"), nodes=2, requeue=True)
    number = jobs.submit(folder)
    until((folder / "trains").exists, "a step")
    assert queue.run_slurm("scancel", "--signal=USR2", number).returncode == 0
    assert end_of(number) == "FAILED"
    log = (folder / f"slurm-{number}.log").read_text()
    assert "is requeued" not in log and f"sbatch '{folder}/job.sbatch'" in log.splitlines()[-1]


def test_a_script_that_hears_no_signal_is_not_warned(job, capsys):
    folder = job(FAILS_ONCE, requeue=True)
    text = (folder / "job.sbatch").read_text()
    assert "--signal" not in text and "#SBATCH --requeue" in text
    assert "handles no SIGUSR2" in capsys.readouterr().err


def test_a_run_that_is_resumed_by_hand_to_its_end_is_done(cluster, job, capsys):
    folder = job(FAILS_ONCE, requeue=True)
    assert end_of(jobs.submit(folder)) == "FAILED"
    [run] = jobs.collect(folder)
    assert run.state == "failed"
    assert end_of(by_hand(folder)) == "COMPLETED"
    [run] = jobs.collect(folder)
    assert (run.state, len(run.epochs), len(submitted(folder))) == ("done", 2, 2)
    assert run.job["job_id"] == submitted(folder)[-1]


def test_a_run_goes_on_by_a_command_and_by_no_other_folder(cluster, job, capsys):
    folder = job(FAILS_ONCE, requeue=True)
    assert end_of(jobs.submit(folder)) == "FAILED"
    with pytest.raises(jobs.JobError, match="submitted already"):
        jobs.submit(folder)
    assert main(["job", "--again", str(folder)]) == 0
    assert end_of(submitted(folder)[-1]) == "COMPLETED"
    assert main(["collect", str(folder)]) == 0
    assert "done, 2 epochs" in capsys.readouterr().out


def test_what_runs_does_not_go_on_a_second_time_and_what_cannot_go_on_never(cluster, job, tmp_path):
    folder = job(SAVES, requeue=True)
    number = jobs.submit(folder)
    refused(jobs.resubmit, folder, named=[number])
    jobs.cancel(number)
    other = tmp_path / "other"
    jobs.prepare(tmp_path / "mine.py", ["{run_dir}"], LOCAL(), other)
    refused(jobs.resubmit, other, named=[str(other)])


def test_a_job_that_was_submitted_by_hand_is_collected(cluster, job):
    folder = job("pass")
    assert end_of(by_hand(folder)) == "COMPLETED"
    [run] = jobs.collect(folder)
    assert (run.state, run.job["job_id"]) == ("done, no record", submitted(folder)[0])


def test_two_submissions_of_one_file_write_two_records(cluster, job):
    folder = job("import sys, pathlib, time\ntime.sleep(2)\nopen(sys.argv[1] + '/lines', 'a').write('x')\n")
    numbers = [by_hand(folder), by_hand(folder)]
    assert [end_of(number) for number in numbers] == ["COMPLETED"] * 2
    [first] = submitted(folder)
    [second] = {*numbers} - {first}
    assert [(path / "lines").read_text() for path in (folder, Path(f"{folder}-{second}"))] == ["x", "x"]


def _claims(folder, barrier, won):
    """Claim the folder at the same moment as others; the exit status tells."""
    barrier.wait(LIMIT)
    claim(folder)
    won.value += 1


def test_of_many_runs_that_start_together_one_has_the_folder(tmp_path):
    fork = get_context("fork")
    for attempt in range(20):
        barrier, won = fork.Barrier(4), fork.Value("i", 0)
        runs = [fork.Process(target=_claims, args=(tmp_path / str(attempt), barrier, won)) for _ in range(4)]
        for run in runs:
            run.start()
        for run in runs:
            run.join(LIMIT)
        assert won.value == 1 and sorted(run.exitcode for run in runs) == [0, 1, 1, 1]


@pytest.fixture
def no_slurm(monkeypatch, tmp_path):
    """Slurm's commands are here, and its controller does not answer."""
    (tmp_path / "bin").mkdir()
    for name in ("sinfo", "sbatch"):
        path = tmp_path / "bin" / name
        path.write_text("#!/bin/sh\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_a_job_for_a_cluster_that_does_not_answer_does_not_run_here(no_slurm, tmp_path):
    path, folder = tmp_path / "mine.py", tmp_path / "run"
    path.write_text("import pathlib, sys\npathlib.Path(sys.argv[1], 'ran').touch()\n")
    jobs.prepare(path, ["{run_dir}"], jobs.Site.load("della"), folder)
    refused(jobs.submit, folder, named=["della", "login node", "job local"])
    assert not list(tmp_path.rglob("ran")) and not folder.exists()
    jobs.prepare(path, ["{run_dir}"], LOCAL(), folder)
    jobs.submit(folder)
    assert (folder / "ran").exists() and json.loads((folder / "job.json").read_text())["source"] == "torchrun"


def test_what_can_go_on_and_what_cannot_is_said_before_the_queue(digits, tmp_path, capsys):
    words = ["--data", str(digits), "--run-dir", "{run_dir}"]
    jobs.prepare("mnist_ddp", words, LOCAL(), tmp_path / "a", requeue=True)
    one_line(capsys.readouterr().err, "mnist_ddp.py handles no SIGUSR2")
    jobs.prepare("mnist_ddp_resumable", words, LOCAL(), tmp_path / "b")
    one_line(capsys.readouterr().err, "mnist_ddp_resumable.py can save", "--requeue")
    jobs.prepare("mnist_ddp_resumable", words, LOCAL(), tmp_path / "c", requeue=True)
    assert not capsys.readouterr().err
