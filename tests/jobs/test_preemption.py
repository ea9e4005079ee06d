"""A job that Slurm stops for one of higher priority goes on; one that is cancelled, or told to end, stays ended.

And what notebook 11 says of each mode of preemption is what this Slurm does.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from changed_text import replaced
from clusters import make_cluster, need_slurm, our_python, remove
from faults.matrix import Matrix, events, weights
from faults.slurm_rows import Submitted
from notebook_texts import files
from real import THOROUGH, until

from ddp_helpers import ROOT, jobs
from ddp_helpers.jobs.queue import run_slurm

PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=node[1-2] MaxTime=01:00:00 State=UP PriorityTier=2 Hidden=YES
PartitionName=requeue_grace Nodes=node[1-2] State=UP PreemptMode=REQUEUE GraceTime=10
PartitionName=requeue Nodes=node[1-2] State=UP PreemptMode=REQUEUE GraceTime=0
PartitionName=cancel_grace Nodes=node[1-2] State=UP PreemptMode=CANCEL GraceTime=10
PartitionName=cancel Nodes=node[1-2] State=UP PreemptMode=CANCEL GraceTime=0
"""


@pytest.fixture(scope="module")
def preempting():
    """A cluster of its own, in which jobs of the partition `urgent` take the nodes of others, after a SIGTERM."""
    need_slurm()
    cluster = make_cluster().up()
    conf = cluster.state / "slurm.conf"
    conf.write_text(conf.read_text().replace("Default=YES", "Default=YES PriorityTier=1 GraceTime=300") + PARTITIONS)
    cluster.kill("slurmctld", "slurmd")
    yield cluster.up()
    remove(cluster)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    matrix = Matrix(tmp_path_factory.mktemp("preempted"))
    matrix.golden()  # now: the server that its ranks are forked from would be taken for a process of the cluster
    return matrix


@pytest.fixture(autouse=True)
def there(preempting, monkeypatch):
    """Commands of these tests go to that cluster."""
    monkeypatch.setenv("SLURM_CONF", str(preempting.state / "slurm.conf"))


@pytest.mark.parametrize("launcher", ["srun", "torchrun"][: 1 + THOROUGH])
def test_a_preempted_job_goes_on_to_the_same_weights(launcher, preempting, matrix):
    with Submitted(matrix, f"preempted-{launcher}", launcher=launcher) as job:
        job.reaches(5)
        urgent = preempting.submit("--partition=urgent", "--nodes=2", "--cpus-per-task=8", "--wrap=true")
        until(lambda: job.state().state == "PENDING", "requeued")
        assert "stopped by SIGTERM" in job.log() and "is requeued" in job.log()
        until(lambda: not jobs.states_of_job(str(urgent))[0].active, "the urgent job's end")
        job.goes_on()
        assert weights(job.folder) == matrix.golden(), "the preempted run differs"


def test_a_job_that_is_cancelled_or_told_by_hand_to_end_stays_ended(matrix):
    with Submitted(matrix, "cancelled") as cancelled, Submitted(matrix, "told-to-end") as told:
        cancelled.reaches(5)
        assert cancelled.processes(), "the control: they are found"
        jobs.cancel(cancelled.number)
        told.reaches(5)
        assert run_slurm("scancel", "--signal=TERM", told.number).returncode == 0
        until(lambda: not told.state().active, "the end")
        assert "stopped by SIGTERM" in told.log() and "is requeued" not in told.log()
        until(lambda: not cancelled.processes(), "no process of the job left, which could requeue it")
        until(lambda: not cancelled.state().active, "the end")
        assert cancelled.state().state == "CANCELLED" and "is requeued" not in cancelled.log()
        assert "Restarts=0" in run_slurm("scontrol", "show", "job", cancelled.number).stdout
        assert [event["event"] for event in events(cancelled.folder)].count("started") == 1


@pytest.mark.skipif(not THOROUGH, reason="the fault matrix has a job that is requeued")
def test_it_is_requeued_where_its_ranks_find_no_command_of_slurms(matrix, tmp_path):
    site = tmp_path / "container.toml"
    our_python(tmp_path / "python")
    site.write_text(f'container = "env PATH=/nowhere"\npython = "{tmp_path}/python"\n')
    with Submitted(matrix, "container", site=site) as job:
        job.reaches(5)
        assert run_slurm("scancel", "--signal=USR2", job.number).returncode == 0
        job.goes_on()
        assert weights(job.folder) == matrix.golden(), "the requeued run differs"


# ---- the modes of preemption, as notebook 11's table has them. KillWait is 5 s here, and a grace time 10 s.

GOES_ON = """import signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
print("begins", flush=True)
while True:
    time.sleep(0.1)
    if told:
        print(f"alive {time.monotonic() - told[0]:.1f}", flush=True)
"""
PLAIN = ["--nodes=1", "--requeue", "--wrap=srun bash -c 'echo begins; exec sleep 1000'"]
STAYS = ["--nodes=1", "--requeue", "--wrap=srun python goes_on.py"]
ELEVEN = ["--requeue", "job.sbatch", "slowly.py", "resumable.py"]
BARE = ["--requeue", "job.sbatch", "slowly.py", "bare.py"]
BREAKS, TESTS = (["--requeue", "job.sbatch", f"{name}.py"] for name in ("breaks", "tests"))
# What the notebook says of an evaluation, here of an hour, put behind the batches of an epoch.
EVALUATION = """    from votes import heard
    print("tests", flush=True)
    for _ in range(3600):
        time.sleep(1)
        if heard: break
    if vote():
        print("told to stop: saved")
        save(path, parts, epoch, step)
        leave()
"""
SAVED = "told to stop: saved"
MODES = {  # what is submitted to which partition; how it ends, how often it was started again, and what its log says
    "requeue_grace, no handler": (PLAIN, "FAILED", 0, ""),
    "requeue, no handler": (PLAIN, "PENDING", 1, ""),
    "requeue_grace, a handler that goes on": (STAYS, "PENDING", 1, "alive 1[1-9]"),  # longer than the grace
    "requeue, a handler that goes on": (STAYS, "PENDING", 1, "alive [3-9]"),  # KillWait warns, too
    "cancel_grace, no handler": (PLAIN, "FAILED", 0, ""),
    "cancel, no handler": (PLAIN, "PREEMPTED", 0, ""),
    "requeue_grace, 11's files": (ELEVEN, "PENDING", 1, SAVED),
    "requeue, 11's files": (ELEVEN, "PENDING", 1, SAVED),
    "cancel_grace, 11's files": (ELEVEN, "PENDING", 1, SAVED),
    "cancel, 11's files": (ELEVEN, "PREEMPTED", 0, SAVED),
    "requeue_grace, 11's files, workers without a handler": (BARE, "FAILED", 0, "killed by signal: Terminated"),
    "requeue_grace, 11's files, told in an evaluation": (BREAKS, "PENDING", 1, rf"tests\n(.*\n)*\d: {SAVED}"),
    "requeue_grace, 11's files, an evaluation to its end": (TESTS, "PENDING", 1, r"\A((?!told)[\s\S])*\Z"),
}


@pytest.fixture(scope="module")
def eleven(tmp_path_factory):
    """A folder with the files of notebook 11, with two loader workers, once without a handler; and steps of 2 s."""
    folder = tmp_path_factory.mktemp("modes")
    written = files(ROOT / "notebooks" / "11_survive_preemption.ipynb")
    written["slowly.py"] = replaced(written["slowly.py"], [("sleep(0.5)", "sleep(2)")])
    written["resumable.py"] = replaced(written["resumable.py"], [('"num_workers": 0', '"num_workers": 2')])
    bare = replaced(written["resumable.py"], [('"worker_init_fn": ignore_signals', '"worker_init_fn": None')])
    breaks = replaced(written["resumable.py"], [("    scheduler.step()\n", f"{EVALUATION}    scheduler.step()\n")])
    breaks = f"import time\n{breaks}"
    tests = replaced(breaks, [("        if heard: break\n", "")])
    written |= {"bare.py": bare, "breaks.py": breaks, "tests.py": tests, "goes_on.py": GOES_ON}
    for name, text in written.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("mode", MODES if THOROUGH else [*MODES][:2])
def test_each_mode_of_preemption_does_what_notebook_11_says(mode, preempting, eleven, monkeypatch):
    monkeypatch.chdir(eleven)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    words, state, restarts, said = MODES[mode]
    if state == "FAILED" and run_slurm("sbatch", "--version").stdout.split()[-1] >= "24.11":
        # What ends within its grace has ended by itself on Slurm 22.05; 24.11 treats it as preempted.
        state, restarts = ("PENDING", 1) if mode.startswith("requeue") else ("PREEMPTED", 0)
    place = [f"--partition={mode.partition(',')[0]}", "--output=%j.log", "--time=20"]
    checkpoint = Path(f"{[*MODES].index(mode)}.pt")
    done = run_slurm("sbatch", "--parsable", *place, *words, *[str(checkpoint)] * ("job.sbatch" in words))
    number = done.stdout.strip()
    log = Path(f"{number}.log")
    begun = r"^(\d: )?tests$" if words in (BREAKS, TESTS) else "^begins$"  # with the rank that srun puts in front
    until(
        lambda: (
            (words in (ELEVEN, BARE) and checkpoint.exists())
            or (log.exists() and re.search(begun, log.read_text(), re.M))
        ),
        f"it runs: {done.stderr}",
    )
    urgent = preempting.submit("--partition=urgent", "--nodes=2", "--cpus-per-task=8", "--wrap=true")
    until(lambda: not jobs.states_of_job(str(urgent))[0].active, "the urgent job's end")
    job = run_slurm("scontrol", "show", "job", number).stdout
    jobs.cancel(number)
    found = re.search(r"JobState=(\w+)", job)[1], int(re.search(r"Restarts=(\d+)", job)[1])
    assert found == (state, restarts), f"{job}\n{log.read_text()}"
    assert re.search(said, log.read_text()), log.read_text()
