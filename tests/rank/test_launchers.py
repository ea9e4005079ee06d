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
from faults.ranks import run
from real import LIMIT, until

from ddp_helpers import ROOT, jobs
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.rank.launchers import LAUNCHERS, cpus_of_rank, who_am_i
from ddp_tools import one_machine

# One write a rank: with PYTHONUNBUFFERED each argument of print is one, and mpirun mixes the writes of two ranks.
SAY = """import os, sys
from ddp_helpers.rank.launchers import LAUNCHERS, who_am_i
launcher, *numbers = who_am_i()
start = "-".join(os.environ[name] for name in LAUNCHERS.get(launcher, ())[:-3])
sys.stdout.write("I am {} {} {} {} of start {}.\\n".format(launcher, *numbers, start))
sys.stdout.flush()"""


def ask(env):
    """What a process with this environment answers."""
    with patch.dict(os.environ, env, clear=True):
        return who_am_i()


def test_a_recorded_environment_is_read():
    read = {name: ask(env) for name, (env, _) in RECORDED.items()}
    assert read == {name: expected for name, (_, expected) in RECORDED.items()}
    assert [*LAUNCHERS] == [*SETS] and {launcher for launcher, *_ in read.values()} == {*LAUNCHERS, "single"}


def test_a_job_that_a_rank_starts_is_not_taken_for_that_rank():
    """A kernel may itself be a rank: nothing by which it is known is handed on."""
    kept = {"SLURM_ACCOUNT": "physics", "I_MPI_FABRICS": "shm", "MPI_HOME": "/opt/mpi"}
    taken = {}
    for name, (env, _) in RECORDED.items():
        with patch.dict(os.environ, env | kept):
            taken[name] = ask(clean := clean_environment())
            assert kept.items() <= clean.items(), "the control: what people set stays"
    assert taken == dict.fromkeys(RECORDED, ("single", 0, 0, 1))


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


MAY_BE_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def who_said(text):
    """What each rank said that it is, sorted; and the names of their starts. Open MPI may join the lines of two."""
    said = re.findall(r"I am (\w+ \d+ \d+ \d+) of start (.*?)\.", text)
    return sorted(who for who, _ in said), {start for _, start in said}


def say(*command):
    """What the ranks that a command starts say; each runs SAY."""
    env = clean_environment() | {"PYTHONPATH": str(ROOT)} | MAY_BE_ROOT
    words = [*command, sys.executable, "-c", SAY]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return who_said(done.stdout)


def test_the_ranks_of_a_real_mpirun_know_who_they_are_and_its_start_from_another(mpirun):
    (first, (one,)), (second, (other,)) = (say("mpirun", "--oversubscribe", "-n", "2") for _ in range(2))
    assert first == second == ["openmpi 0 0 2", "openmpi 1 1 2"] and one != other


def test_real_steps_and_the_shell_of_a_real_allocation(cluster):
    assert say("srun", "--nodes=2", "--ntasks-per-node=1")[0] == ["slurm 0 0 2", "slurm 1 0 2"]
    shell = ["srun", "--interactive", "--preserve-env", "--nodes=1", "--ntasks=1"]  # what use_interactive_step runs
    assert say("salloc", "--ntasks=4", *shell)[0] == ["slurm 0 0 1"]
    assert say("salloc", "--ntasks=1")[0] == ["single 0 0 1"]  # a shell on the login node


def test_mpirun_and_torchrun_inside_a_real_batch_script(cluster, mpirun, tmp_path):
    (tmp_path / "say.py").write_text(SAY)
    python = shlex.quote(sys.executable)  # the checkout may lie in a folder with a space
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node=2 --no-python --"
    job = tmp_path / "job.sh"
    job.write_text(f"""#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --output={tmp_path}/log
export PYTHONPATH={shlex.quote(str(ROOT))}
{python} {tmp_path}/say.py 2>&1
mpirun --oversubscribe --mca ras ^slurm --mca plm isolated -n 2 {python} {tmp_path}/say.py
srun --ntasks=1 {torchrun} {python} {tmp_path}/say.py
echo end
""")
    command = ["sbatch", "--parsable", job]
    env = clean_environment() | MAY_BE_ROOT
    number = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: not jobs.states_of_job(number)[0].active, f"{number} ends")
    log = (tmp_path / "log").read_text()
    assert log.endswith("end\n") and "SLURM_NTASKS=2, but no launcher" in log, log
    ranks, _ = who_said(log)
    assert ranks == [f"{launcher} {rank} {rank} 2" for launcher in ("openmpi", "torchrun") for rank in (0, 1)], log


CPUS = {  # CPUs that the process may use, variables, CPUs of the rank
    "alone": (8, {}, 8),
    "a task of Slurm": (8, {"SLURM_CPUS_PER_TASK": "3"}, 3),
    "a task that srun gave fewer": (2, {"SLURM_CPUS_PER_TASK": "16"}, 2),
    "torchrun's ranks share": (8, {"LOCAL_WORLD_SIZE": "2"}, 4),
    "torchrun's ranks share its task": (64, {"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_PER_TASK": "8"}, 4),
    "more ranks than CPUs": (1, {"LOCAL_WORLD_SIZE": "2"}, 1),
    "no number": (4, {"SLURM_CPUS_PER_TASK": "two"}, 4),
}


def test_the_cpus_of_a_rank():
    found = {}
    for name, (usable, env, _) in CPUS.items():
        with patch.dict(os.environ, env), patch("os.sched_getaffinity", lambda _, cpus=usable: {*range(cpus)}):
            found[name] = cpus_of_rank()
    assert found == {name: expected for name, (*_, expected) in CPUS.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a held port could not be listened at")
def test_a_port_that_waits_for_its_rank_is_given_to_nobody_else_and_the_rank_can_listen_there(monkeypatch):
    port = one_machine.free_port()
    assert 1024 < port < 32_768, "from there on Linux gives them to whoever asks for any"
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    drawn = iter([port - one_machine.PORTS.start, 7, 8, 9])
    with monkeypatch.context() as patched:
        patched.setattr(one_machine.secrets, "randbelow", lambda _: next(drawn))
        assert one_machine.free_port() != port
    socket.create_server(("127.0.0.1", port)).close()
    one_machine.HELD.clear()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # the control


MEET = """import os, sys, torch
import torch.distributed as dist
from ddp_helpers.rank.scripts.mnist_ddp import form_group

form_group(int(os.environ["RANK"]), 2, torch.device("cpu"), float(sys.argv[1]))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_meet_at_an_ipv6_address(tmp_path):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "meet.py").write_text(MEET)
    ended = run(tmp_path / "meet.py", LIMIT, folder=tmp_path, env={"MASTER_ADDR": "::1", "MASTER_PORT": port})
    assert ended.statuses == [0, 0], ended.said
