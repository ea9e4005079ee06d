"""Who am I, under each launcher: from recorded environments, and for real where the launcher is on this machine."""

import os
import re
import shlex
import socket
import subprocess
import sys
from unittest.mock import patch

import pytest
from environments import BATCH, RECORDED, SETS, STEP
from real import LIMIT, until

from ddp_helpers import ROOT, jobs
from ddp_helpers.launch import launchers
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.rank.launchers import LAUNCHERS, cpus_of_rank, who_am_i


def without(env, name):
    """The environment without this variable."""
    return {key: value for key, value in env.items() if key != name}


# One write a rank: with PYTHONUNBUFFERED each argument of print is one, and mpirun mixes the writes of two ranks.
SAY = """import sys
from ddp_helpers.rank.launchers import who_am_i
sys.stdout.write("I am {} {} {} {}\\n".format(*who_am_i()))
sys.stdout.flush()"""


def ask(env):
    """What a process with this environment answers."""
    with patch.dict(os.environ, env, clear=True):
        return who_am_i()


def test_each_launcher_has_a_recorded_environment():
    assert [*LAUNCHERS] == [*SETS]
    assert {launcher for _, (launcher, *_) in RECORDED.values()} == {*LAUNCHERS, "single"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_environment_is_read(name):
    env, expected = RECORDED[name]
    assert ask(env) == expected


@pytest.mark.parametrize("name", RECORDED)
def test_a_job_that_a_rank_starts_is_not_taken_for_that_rank(name, monkeypatch):
    """A kernel may itself be a rank: nothing by which it is known is handed on."""
    kept = {"SLURM_ACCOUNT": "physics", "I_MPI_FABRICS": "shm", "MPI_HOME": "/opt/mpi"}
    for variable, value in (RECORDED[name][0] | kept).items():
        monkeypatch.setenv(variable, value)
    assert ask(clean_environment()) == ("single", 0, 0, 1)
    assert kept.items() <= clean_environment().items(), "the control: what people set stays"


ALONE = {  # no launcher started this process, and somebody expected one
    "a batch script without srun": (BATCH, "SLURM_NTASKS=4, but no launcher started this process"),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2, but no launcher"),
    "RANK without LOCAL_RANK": ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2, but no launcher"),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_process_that_no_launcher_started_does_not_train_alone(case):
    env, says = ALONE[case]
    with pytest.raises(SystemExit, match=says):
        ask(env)


def test_a_row_counts_as_a_whole_whatever_is_exported_above_it():
    # export RANK=$SLURM_PROCID in the batch body: it is 0 there, and so in every task.
    assert ask(STEP | {"RANK": "0", "WORLD_SIZE": "4"}) == ("slurm", 3, 1, 4)
    assert ask(STEP | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}) == ("slurm", 3, 1, 4)


def say(*command):
    """What the ranks that a command starts say, sorted; each runs SAY."""
    env = clean_environment() | {
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    words = [*command, sys.executable, "-c", SAY]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"I am (\w+ \d+ \d+ \d+)", done.stdout))  # mpirun may join the lines of two ranks


def test_a_real_mpirun(mpirun):
    assert say("mpirun", "--oversubscribe", "-n", "2") == ["openmpi 0 0 2", "openmpi 1 1 2"]


def test_real_steps_and_the_shell_of_a_real_allocation(cluster):
    assert say("srun", "--nodes=2", "--ntasks-per-node=1") == ["slurm 0 0 2", "slurm 1 0 2"]
    shell = ["srun", "--interactive", "--preserve-env", "--nodes=1", "--ntasks=1"]  # what use_interactive_step runs
    assert say("salloc", "--ntasks=4", *shell) == ["slurm 0 0 1"]
    assert say("salloc", "--ntasks=1") == ["single 0 0 1"]  # a shell on the login node


def test_mpirun_and_torchrun_inside_a_real_batch_script(cluster, mpirun, tmp_path):
    (tmp_path / "say.py").write_text(SAY)
    python = shlex.quote(sys.executable)  # the checkout may lie in a folder with a space
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node=2 --no-python --"
    job = tmp_path / "job.sh"
    job.write_text(f"""#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --output={tmp_path}/log
export PYTHONPATH={shlex.quote(str(ROOT))} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
{python} {tmp_path}/say.py 2>&1
mpirun --oversubscribe --mca ras ^slurm --mca plm isolated -n 2 {python} {tmp_path}/say.py
srun --ntasks=1 {torchrun} {python} {tmp_path}/say.py
echo end
""")
    done = subprocess.run(
        ["sbatch", "--parsable", job], env=clean_environment(), capture_output=True, text=True, check=True
    )
    log = tmp_path / "log"
    number = done.stdout.strip()
    until(
        lambda: log.exists() and "end\n" in log.read_text() and not jobs.states_of_job(number)[0].active,
        f"{number} ends",
    )
    lines = sorted(line[5:] for line in log.read_text().splitlines() if line.startswith("I am"))
    ranks = [f"{launcher} {rank} {rank} 2" for launcher in ("openmpi", "torchrun") for rank in range(2)]
    assert lines == ranks and "SLURM_NTASKS=2, but no launcher" in log.read_text(), log.read_text()


CPUS = {  # CPUs that the process may use, variables, CPUs of the rank
    "alone": (8, {}, 8),
    "a task of Slurm": (8, {"SLURM_CPUS_PER_TASK": "3"}, 3),
    "a task that srun gave fewer": (2, {"SLURM_CPUS_PER_TASK": "16"}, 2),
    "torchrun's ranks share": (8, {"LOCAL_WORLD_SIZE": "2"}, 4),
    "torchrun's ranks share its task": (64, {"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_PER_TASK": "8"}, 4),
    "more ranks than CPUs": (1, {"LOCAL_WORLD_SIZE": "2"}, 1),
    "no number": (4, {"SLURM_CPUS_PER_TASK": "two"}, 4),
}


@pytest.mark.parametrize("name", CPUS)
def test_the_cpus_of_a_rank(name, monkeypatch):
    usable, env, expected = CPUS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    assert cpus_of_rank() == expected


def test_a_free_port_is_free_and_none_that_linux_gives_away():
    ports = {launchers.free_port() for _ in range(200)}
    assert len(ports) > 100 and max(ports) < 32768
    launchers.HELD.clear()
    taken, free = ports.pop(), ports.pop()
    with socket.create_server(("127.0.0.1", taken)), pytest.MonkeyPatch.context() as patch:
        drawn = iter([taken - 20_000, free - 20_000])
        patch.setattr(launchers.secrets, "randbelow", lambda _: next(drawn))
        assert launchers.free_port() == free


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a held port could not be listened at")
def test_a_port_that_waits_for_its_rank_is_given_to_nobody_else_and_the_rank_can_listen_there():
    port = launchers.free_port()
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    socket.create_server(("127.0.0.1", port)).close()
    launchers.HELD.clear()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # the control


def test_ranks_meet_at_an_ipv6_address(tmp_path):
    code = "import sys, torch; from ddp_helpers.rank.scripts.mnist_ddp import join\n"
    code += f"join(int(sys.argv[1]), 2, torch.device('cpu'), {LIMIT})\n"
    code += "import torch.distributed as dist; dist.barrier(); dist.destroy_process_group()"
    env = os.environ | {"MASTER_ADDR": "::1", "MASTER_PORT": "29733", "PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)], env=env) for rank in range(2)]
    assert [rank.wait(LIMIT) for rank in ranks] == [0, 0]
