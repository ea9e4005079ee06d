"""Who am I, under each launcher: from recorded environments, and for real where the launcher is on this machine."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from real import IMPORT, until

from ddp_helpers import ROOT
from ddp_helpers.notebook import slurm
from ddp_helpers.notebook.launchers import clean
from ddp_helpers.rank.launchers import who_am_i

BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
RECORDED = {
    "nothing": ({}, ("single", 0, 0, 1)),
    "a batch script": (BATCH, ("single", 0, 0, 1)),
    "a step": (STEP, ("slurm", 3, 1, 4)),
    # salloc -n4 where LaunchParameters has use_interactive_step, and srun --pty bash: a step of one task
    "the shell of an allocation": (
        BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        ("slurm", 0, 0, 1),
    ),
    "mpirun": (MPIRUN, ("openmpi", 1, 1, 2)),
    "mpirun in a batch script": (BATCH | MPIRUN, ("openmpi", 1, 1, 2)),
    "MPICH, and Intel MPI": ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, ("mpich", 2, 0, 4)),
    "PALS": ({"PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4"}, ("pals", 6, 2, 8)),
    "torchrun under srun": (STEP | TORCHRUN, ("torchrun", 5, 1, 8)),
    "by hand": ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, ("env", 1, 1, 2)),
    "srun with PMI2": (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "10"}, ("slurm", 3, 1, 4)),
}
CONTRADICTIONS = {
    "RANK from the batch script": STEP | {"RANK": "0"},
    "another world size": STEP | {"WORLD_SIZE": "2"},
    "a world size and no launcher": {"WORLD_SIZE": "2"},
    "a rank too high": {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    "a local rank above the rank": {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    "no number": {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    "a number is missing": {"RANK": "0", "WORLD_SIZE": "2"},
}
# One write a rank: with PYTHONUNBUFFERED each argument of print is one, and mpirun mixes the writes of two ranks.
SAY = """import sys
from ddp_helpers.rank.launchers import who_am_i
sys.stdout.write("I am {} {} {} {}\\n".format(*who_am_i()))
sys.stdout.flush()"""


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_environment_is_read(name):
    env, expected = RECORDED[name]
    assert who_am_i(env) == expected


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_stops_with_one_line(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        who_am_i(CONTRADICTIONS[name])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.err.count("\n") == 1 and "export neither" in said.err


def say(*command):
    """What the ranks that a command starts say, sorted; each runs SAY."""
    env = clean() | {"PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [*command, sys.executable, "-c", SAY]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=IMPORT, check=False)
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
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node=2 --no-python"
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
    done = subprocess.run(["sbatch", "--parsable", job], env=clean(), capture_output=True, text=True, check=True)
    log = tmp_path / "log"
    until(
        lambda: log.exists() and "end\n" in log.read_text() and not slurm.look(done.stdout.strip())[0].active, "end", 90
    )
    lines = sorted(line[5:] for line in log.read_text().splitlines() if line.startswith("I am"))
    ranks = [f"{launcher} {rank} {rank} 2" for launcher in ("openmpi", "torchrun") for rank in range(2)]
    assert lines == sorted(["single 0 0 1", *ranks]), log.read_text()


def test_one_visible_gpu_is_cuda_0_for_every_local_rank(monkeypatch):
    import torch

    from ddp_helpers.rank import group

    claimed = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setattr(group.dist, "init_process_group", lambda **_: (_ for _ in ()).throw(RuntimeError("no GPU")))
    args = group.Namespace(no_cuda=False, timeout=1, global_batch_size=None, batch_size=1)
    with pytest.raises(SystemExit):
        group.join(args, "slurm", 1, 1, 2)
    assert claimed == [torch.device("cuda", 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        group.join(args, "slurm", 3, 1, 4)
    assert claimed[1] == torch.device("cuda", 1)
    with pytest.raises(SystemExit, match="local rank 2 finds 2 GPUs"):
        group.join(args, "slurm", 2, 2, 4)


def test_ranks_meet_at_an_ipv6_address(tmp_path):
    code = "from argparse import Namespace as N; from ddp_helpers.rank.group import join; import os, sys\n"
    code += "a = N(no_cuda=True, timeout=30, global_batch_size=None, batch_size=1)\n"
    code += "join(a, 'env', int(sys.argv[1]), 0, 2)\n"
    code += "import torch.distributed as dist; dist.barrier(); dist.destroy_process_group()"
    env = os.environ | {"MASTER_ADDR": "::1", "MASTER_PORT": "29733", "PYTHONPATH": str(ROOT)}
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)], env=env) for rank in range(2)]
    assert [rank.wait(IMPORT) for rank in ranks] == [0, 0]
