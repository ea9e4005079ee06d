"""A job that Slurm stops for one of higher priority goes on; one that is cancelled, or told to end, stays ended."""

import pytest
from clusters import make_cluster, need_slurm, our_python, remove
from faults.matrix import Matrix, events, weights
from faults.slurm_rows import Submitted
from real import THOROUGH, until

from ddp_helpers import jobs
from ddp_helpers.jobs.queue import run_slurm

PARTITIONS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=node[1-2] MaxTime=01:00:00 State=UP PriorityTier=2 Hidden=YES
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
