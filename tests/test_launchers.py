"""Who am I, under each launcher: from recorded environments, and for real where the launcher is on this machine."""

import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
from environments import BATCH, HAND, MPI, MPICH, PALS, RECORDED, SETS, STEP, TORCHRUN
from real import LIMIT, until
from refusals import refused

from ddp_helpers import ROOT, jobs
from ddp_helpers.launch import launchers
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.rank.launchers import LAUNCHERS, STARTS, cpus_of_rank, who_am_i


def without(env, name):
    """The environment without this variable."""
    return {key: value for key, value in env.items() if key != name}


CONTRADICTIONS = {  # environment, and what the line must say
    "RANK without WORLD_SIZE": (without(HAND, "WORLD_SIZE"), "env: ['1', '1', '']"),
    "WORLD_SIZE without RANK": (without(HAND, "RANK"), "single: ['0', '0', '1'] ['0', '0', '2']"),
    "no LOCAL_RANK": (without(HAND, "LOCAL_RANK"), "env: ['1', '', '2']"),
    "torchrun without RANK": (without(TORCHRUN, "RANK"), "torchrun: ['', '0', '4']"),
    "step without PROCID": (without(STEP, "SLURM_PROCID"), "slurm: ['', '1', '4']"),
    "mpirun without its rank": (without(MPI, "OMPI_COMM_WORLD_RANK"), "openmpi: ['', '1', '2']"),
    "MPICH without its size": (without(MPICH, "PMI_SIZE"), "mpich: ['3', '1', '']"),
    "PALS without its rank": (without(PALS, "PMI_RANK"), "pals: ['', '1', '4']"),
    "RANK = WORLD_SIZE": (HAND | {"RANK": "2"}, "env: ['2', '1', '2']"),
    "RANK > WORLD_SIZE": (TORCHRUN | {"RANK": "9"}, "torchrun: ['9', '0', '4']"),
    "a local rank above the rank": (HAND | {"RANK": "0"}, "env: ['0', '1', '2']"),
    "PROCID = NUM_TASKS": (STEP | {"SLURM_PROCID": "4"}, "slurm: ['4', '1', '4']"),
    "no ranks": (HAND | {"WORLD_SIZE": "0", "RANK": "0", "LOCAL_RANK": "0"}, "env: ['0', '0', '0']"),
    "WORLD_SIZE in a batch body": (BATCH | {"WORLD_SIZE": "4"}, "single: ['0', '0', '1'] ['0', '0', '4']"),
    "WORLD_SIZE in a step": (STEP | {"WORLD_SIZE": "2"}, "slurm: ['3', '1', '4'] ['3', '1', '2']"),
    "WORLD_SIZE under mpirun": (MPI | {"WORLD_SIZE": "4"}, "openmpi: ['1', '1', '2'] ['1', '1', '4']"),
    # export RANK=$SLURM_PROCID in the batch body: it is 0 there, and so in every task.
    "exported RANK": (STEP | {"RANK": "0"}, "slurm: ['3', '1', '4'] ['0', '1', '4']"),
    "two lines in a value": (HAND | {"RANK": "1\n2"}, "env: ['1\\n2', '1', '2']"),
}
# The last two are digits that are not ASCII.
NO_NUMBERS = ["-1", "one", "", " ", "1.5", "0x1", "+1", "1_0", "9" * 30, "9" * 5000, "\u00b2", "\u0661"]
NUMBERS = [
    (HAND, "RANK"),
    (HAND, "WORLD_SIZE"),
    (TORCHRUN, "LOCAL_RANK"),
    (STEP, "SLURM_PROCID"),
    (STEP, "SLURM_STEP_NUM_TASKS"),
    (STEP, "WORLD_SIZE"),
    (MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
    (MPI, "RANK"),
    (MPICH, "PMI_SIZE"),
    (PALS, "PMI_LOCAL_RANK"),
]
# One write a rank: with PYTHONUNBUFFERED each argument of print is one, and mpirun mixes the writes of two ranks.
SAY = """import sys
from ddp_helpers.rank.launchers import who_am_i
sys.stdout.write("I am {} {} {} {}\\n".format(*who_am_i()))
sys.stdout.flush()"""


def test_each_launcher_has_a_name_for_its_starts_and_a_recorded_environment():
    assert [*LAUNCHERS] == [*STARTS] == [*SETS]
    assert {launcher for _, (launcher, *_) in RECORDED.values()} == {*LAUNCHERS, "single"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_environment_is_read(name):
    env, expected = RECORDED[name]
    assert who_am_i(env) == expected


@pytest.mark.parametrize("name", RECORDED)
def test_a_job_that_a_rank_starts_is_not_taken_for_that_rank(name, monkeypatch):
    """A kernel may itself be a rank: nothing by which it is known is handed on."""
    kept = {"SLURM_ACCOUNT": "physics", "I_MPI_FABRICS": "shm", "MPI_HOME": "/opt/mpi"}
    for variable, value in (RECORDED[name][0] | kept).items():
        monkeypatch.setenv(variable, value)
    assert who_am_i(clean_environment()) == ("single", 0, 0, 1)
    assert kept.items() <= clean_environment().items(), "the control: what people set stays"


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_stops_with_one_line(name):
    env, parts = CONTRADICTIONS[name]
    refused(who_am_i, env, named=["export", *re.findall(r"^\w+: |\[.*?\]", parts)])


@pytest.mark.parametrize(("env", "variable"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_what_is_no_number_stops_with_one_line(env, variable):
    for value in NO_NUMBERS:
        refused(who_am_i, env | {variable: value}, named=[repr(value), "export"])


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
    assert say("salloc", "--ntasks=4") == ["single 0 0 1"]  # a shell on the login node


def test_mpirun_and_torchrun_inside_a_real_batch_script(cluster, mpirun, tmp_path):
    (tmp_path / "say.py").write_text(SAY)
    python = shlex.quote(sys.executable)  # the checkout may lie in a folder with a space
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node=2 --no-python --"
    job = tmp_path / "job.sh"
    job.write_text(f"""#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --output={tmp_path}/log
export PYTHONPATH={shlex.quote(str(ROOT))} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
{python} {tmp_path}/say.py
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
    assert lines == sorted(["single 0 0 1", *ranks]), log.read_text()


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
    taken, free = ports.pop(), ports.pop()
    with socket.create_server(("127.0.0.1", taken)), pytest.MonkeyPatch.context() as patch:
        drawn = iter([taken - 20_000, free - 20_000])
        patch.setattr(launchers.secrets, "randbelow", lambda _: next(drawn))
        assert launchers.free_port() == free


def test_ranks_meet_at_an_ipv6_address(tmp_path):
    code = "import sys, torch; from ddp_helpers.rank.group import join\n"
    code += f"join('env', int(sys.argv[1]), 2, torch.device('cpu'), {LIMIT})\n"
    code += "import torch.distributed as dist; dist.barrier(); dist.destroy_process_group()"
    env = os.environ | {"MASTER_ADDR": "::1", "MASTER_PORT": "29733", "PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)], env=env) for rank in range(2)]
    assert [rank.wait(LIMIT) for rank in ranks] == [0, 0]


ONE_STAYS_AWAY = """
import os, sys, torch
from ddp_helpers.rank.group import join
rank = int(os.environ["RANK"])
if rank != 1:
    join("torchrun", rank, 3, torch.device("cpu"), 3)
"""


def test_a_rank_that_never_joins_is_named_by_the_others(tmp_path):
    script = tmp_path / "one_stays_away.py"
    script.write_text(ONE_STAYS_AWAY)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node=3", script],
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    lines = [line for line in run.stderr.splitlines() if re.match("rank [02] of 3: ", line)]
    assert run.returncode and lines, run.stderr
    assert all("; rank 1 has not joined: " in line and "export MASTER_ADDR" not in line for line in lines), lines
