"""What becomes of a run that is submitted twice, killed, requeued, or sent to a cluster that does not answer."""

import os
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import nbformat
import pytest
from clusters import our_python, program
from real import LIMIT, THOROUGH, until
from refusals import refused

from ddp_helpers import ROOT, jobs
from ddp_helpers.cli import main
from ddp_helpers.jobs import queue
from ddp_helpers.launch.processes import marked_processes
from ddp_helpers.rank.record import claim

LOCAL = partial(jobs.Site.load, "local")

# A script as the pages describe it, but for the training: told to stop it saves, writes REQUEUE_FILE, leaves with 75.
SAVES = """
import os, pathlib, signal, sys, time

heard = []
signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
folder = pathlib.Path(sys.argv[1])
(folder / f"hears-{rank}").touch()
saved = folder / "saved"
begin = int(saved.read_text()) if saved.exists() else 0
for step in range(begin, begin + 3 if begin else 10**9):
    if heard:
        if rank == "0":
            (folder / "part").write_text(str(step + 1))
            MARK
            (folder / "part").rename(saved)
        while not saved.exists():  # nobody leaves before
            time.sleep(0.05)
        sys.exit(75)
    time.sleep(0.05)
print("to the end, from step", begin)
"""
MARK = 'pathlib.Path(os.environ["REQUEUE_FILE"]).touch()'

# Is done in its third attempt, and fails before.
GOES_ON = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "spec.json").write_text("{}")
with (folder / "metrics.jsonl").open("a+") as file:
    file.seek(0)
    epoch = len(file.readlines()) + 1
    file.write(json.dumps({"epoch": epoch}) + chr(10))
(folder / "status.json").write_text(json.dumps({"state": "done" if epoch == 3 else "failed"}))
sys.exit(epoch < 3)
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


def restarts(number):
    """How often Slurm has started this job again."""
    fields = queue.run_slurm("scontrol", "show", "job", number).stdout.split()
    return [field for field in fields if field.startswith("Restarts=")]


def two_hear(folder):
    """Wait until both ranks listen for the signal."""
    until(lambda: len(list(folder.glob("hears-*"))) == 2, "two ranks that hear")


def warn(folder, number):
    """Warn both ranks."""
    two_hear(folder)
    assert queue.run_slurm("scancel", "--signal=USR2", number).returncode == 0


@pytest.mark.parametrize("launcher", ["srun"] + ["torchrun"] * THOROUGH)
def test_a_script_that_saves_when_it_is_warned_and_says_so_is_requeued_and_goes_on(launcher, cluster, job):
    folder = job(SAVES.replace("MARK", MARK), nodes=2, requeue=True, launcher=launcher)
    number = jobs.submit(folder)
    warn(folder, number)
    until(lambda: jobs.states_of_job(number)[0].state == "PENDING", "the job in the queue again")
    time.sleep(2)  # a node refuses a job that it has ended within the same second
    jobs.start_now(number)
    assert end_of(number) == "COMPLETED" and restarts(number) == ["Restarts=1"]
    log = (folder / f"slurm-{number}.log").read_text()
    assert log.count(f"to the end, from step {(folder / 'saved').read_text()}\n") == 2
    assert not list(folder.glob("requeue-*"))


def test_a_script_that_does_not_say_so_is_not_requeued(cluster, job):
    folder = job(SAVES.replace("MARK", "pass"), nodes=2, requeue=True)
    number = jobs.submit(folder)
    warn(folder, number)
    assert (end_of(number), restarts(number)) == ("FAILED", ["Restarts=0"])
    log = (folder / f"slurm-{number}.log").read_text()
    assert "is requeued" not in log and f"sbatch '{folder}/job.sbatch'" in log.splitlines()[-1]


def test_a_job_of_notebook_11_that_is_cancelled_stays_ended(cluster, tmp_path, monkeypatch):
    """Even if its ranks have asked for a requeue just before: the control of what the notebook shows."""
    cells = nbformat.read(ROOT / "notebooks" / "11_survive_preemption.ipynb", as_version=4).cells
    [text] = [cell.source for cell in cells if cell.source.startswith("%%writefile job.sbatch\n")]
    (tmp_path / "job.sbatch").write_text(text.partition("\n")[2])
    (tmp_path / "mine.py").write_text(SAVES)
    our_python(tmp_path / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    done = queue.run_slurm("sbatch", "--parsable", "job.sbatch", "mine.py", ".", cwd=tmp_path)
    number = done.stdout.strip()
    try:
        two_hear(tmp_path)
        (tmp_path / f"requeue-{number}-0").touch()  # as by ranks that were told just before
        assert marked_processes(number, "SLURM_JOB_ID"), "the control: they are found"
    finally:
        jobs.cancel(number)
    until(lambda: not marked_processes(number, "SLURM_JOB_ID"), "nobody who could requeue it")
    assert (end_of(number), restarts(number)) == ("CANCELLED", ["Restarts=0"])


def test_a_run_goes_on_by_a_command_and_by_hand_until_it_is_done(cluster, job, capsys):
    folder = job(GOES_ON, requeue=True)
    assert end_of(jobs.submit(folder)) == "FAILED"
    refused(jobs.submit, folder, named=["submitted already", "--again"])
    assert main(["job", "--again", str(folder)]) == 0
    assert end_of(submitted(folder)[-1]) == "FAILED"
    assert [run.state for run in jobs.collect(folder)] == ["failed"]
    assert end_of(by_hand(folder)) == "COMPLETED"
    assert main(["collect", str(folder)]) == 0
    assert "done, 3 epochs" in capsys.readouterr().out
    [run] = jobs.collect(folder)
    assert len(submitted(folder)) == 3 and run.job["job_id"] == submitted(folder)[-1]


def test_what_runs_does_not_go_on_a_second_time_and_what_cannot_go_on_never(cluster, job, tmp_path):
    folder = job(SAVES, requeue=True)
    number = jobs.submit(folder)
    refused(jobs.resubmit, folder, named=[number])
    jobs.cancel(number)
    other = tmp_path / "other"
    jobs.prepare(tmp_path / "mine.py", ["{run_dir}"], LOCAL(), other)
    refused(jobs.resubmit, other, named=[str(other)])


def test_two_submissions_of_one_file_by_hand_write_two_records_and_the_first_is_collected(cluster, job):
    folder = job("import sys\nopen(sys.argv[1] + '/lines', 'a').write('x')\n")
    numbers = [by_hand(folder), by_hand(folder)]
    assert [end_of(number) for number in numbers] == ["COMPLETED"] * 2
    [first] = submitted(folder)
    [second] = {*numbers} - {first}
    assert [(path / "lines").read_text() for path in (folder, Path(f"{folder}-{second}"))] == ["x", "x"]
    [run] = jobs.collect(folder)
    assert (run.state, run.job["job_id"]) == ("done, no record", first)


def test_a_run_that_is_done_stays_done_when_a_later_submission_is_cancelled(cluster, job):
    wait = "import pathlib, sys, time\np = pathlib.Path(sys.argv[1], 'first')\n"
    folder = job(f"{wait}time.sleep(600 if p.exists() else 0)\np.touch()\n", requeue=True)
    assert end_of(by_hand(folder)) == "COMPLETED"
    later = by_hand(folder)
    until(lambda: len(submitted(folder)) == 2, "the later one to run")
    jobs.cancel(later)
    assert end_of(later) == "CANCELLED"
    [run] = jobs.collect(folder)
    assert run.state == "done, no record"


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


def test_a_job_for_a_cluster_that_does_not_answer_does_not_run_here(tmp_path, monkeypatch):
    """Where one answers it is submitted, and at the site local it runs here: see test_run."""
    for name in ("sinfo", "sbatch"):  # they are here, and the controller does not answer
        program(tmp_path / "bin" / name, "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "mine.py").write_text("import pathlib, sys\npathlib.Path(sys.argv[1], 'ran').touch()\n")
    jobs.prepare(tmp_path / "mine.py", ["{run_dir}"], jobs.Site.load("della"), tmp_path / "run")
    refused(jobs.submit, tmp_path / "run", named=["della", "login node", "job local"])
    assert not list(tmp_path.rglob("ran")) and not (tmp_path / "run").exists()
