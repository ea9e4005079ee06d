"""Topology: what every launcher's real environment means, and one line for what contradicts itself."""

import os
import re
import socket
from contextlib import closing
from zlib import crc32

import pytest
import torch

from ddp_helpers.rank.topology import Topology


def variables(text):
    """NAME=value, separated by blanks, as a mapping."""
    return dict(word.split("=", 1) for word in text.split())


# Recorded on Slurm 22.05: the body of a batch job of 2 nodes of 2 tasks. SLURM_PROCID is 0 in every one.
BATCH = variables("""
    CUDA_VISIBLE_DEVICES=0,1 SLURMD_NODENAME=node1 SLURM_CPUS_ON_NODE=2 SLURM_CPUS_PER_TASK=1 SLURM_GPUS_ON_NODE=2
    SLURM_GTIDS=0 SLURM_JOBID=1 SLURM_JOB_CPUS_PER_NODE=2(x2) SLURM_JOB_GPUS=0,1 SLURM_JOB_ID=1
    SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NPROCS=4
    SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)
""")
# And the last task of its step: srun without arguments.
STEP = BATCH | variables("""
    MASTER_ADDR=node1 SLURMD_NODENAME=node2 SLURM_DISTRIBUTION=block SLURM_GTIDS=2,3
    SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=3 SLURM_SRUN_COMM_PORT=38871
    SLURM_STEPID=0 SLURM_STEP_GPUS=0,1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)
""")
# Node 1 of a step of 4 + 3 tasks: GTIDS are the ranks on this node.
UNEVEN = STEP | variables("""
    SLURM_GTIDS=4,5,6 SLURM_LOCALID=2 SLURM_NPROCS=7 SLURM_NTASKS=7 SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=7
    SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_TASKS_PER_NODE=4,3
""")
ONE_TASK = STEP | variables("""
    SLURM_GTIDS=0 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
""")
del ONE_TASK["MASTER_ADDR"]
INTERACTIVE = variables("SLURM_JOB_ID=77 SLURM_JOBID=77 SLURM_JOB_NODELIST=node1 SLURM_NNODES=1")
# Recorded on Open MPI 4.1: rank 1 of mpirun -n 2.
MPI = variables("""
    OMPI_APP_CTX_NUM_PROCS=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_FIRST_RANKS=0 OMPI_NUM_APP_CTX=1 OMPI_UNIVERSE_SIZE=2
    PMIX_NAMESPACE=1973354497 PMIX_RANK=1
""")
TORCHRUN = variables("""
    GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29400 RANK=2
    ROLE_NAME=default ROLE_RANK=2 ROLE_WORLD_SIZE=4 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=4
""")
# Rank 3 of Intel MPI's mpirun -n 4 -ppn 2, as far as a Topology reads it; MPICH sets the same.
MPICH = variables("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_RANK=3 PMI_SIZE=4 MASTER_ADDR=node1")
# The same rank of HPE Cray's mpiexec, in a PBS job.
PALS = variables("""
    PALS_APID=7e1 PALS_LOCAL_RANKID=1 PALS_NODEID=1 PALS_RANKID=3 PBS_JOBID=4711.pbs PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2
    PMI_RANK=3 PMI_SIZE=4 MASTER_ADDR=node1
""")
# Recorded on Slurm 22.05: the shell of salloc -n4, with LaunchParameters=use_interactive_step.
SALLOC = variables("""
    SLURM_CPUS_ON_NODE=4 SLURM_GTIDS=0 SLURM_JOB_ID=1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_PROCID=0
    SLURM_STEPID=4294967290 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=4
""")
HAND = variables("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_PORT=29500")
HERE = "127.0.0.1"

KNOWN = {  # environment: rank, local rank, world size, ranks on this node, node, launcher, address, port
    "nothing": ({}, Topology()),
    "batch body": (BATCH, Topology(0, 0, 1, 1, 0, "single", HERE, 0)),
    "interactive allocation": (INTERACTIVE, Topology(0, 0, 1, 1, 0, "single", HERE, 0)),
    "shell of salloc": (SALLOC, Topology(0, 0, 1, 1, 0, "slurm", HERE, 10_001)),
    "step": (STEP, Topology(3, 1, 4, 2, 1, "slurm", "node1", 10_001)),
    "step, uneven nodes": (UNEVEN, Topology(6, 2, 7, 3, 1, "slurm", "node1", 10_001)),
    "step of one task": (ONE_TASK, Topology(0, 0, 1, 1, 0, "slurm", HERE, 10_001)),
    "torchrun": (TORCHRUN, Topology(2, 0, 4, 2, 1, "torchrun", "node1", 29_400)),
    # One torchrun for each node, started by srun: Slurm then counts 2 tasks where torchrun has 4 ranks.
    "torchrun under srun": (
        STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_GTIDS": "1"} | TORCHRUN,
        Topology(2, 0, 4, 2, 1, "torchrun", "node1", 29_400),
    ),
    "mpirun": (MPI, Topology(1, 1, 2, 2, 0, "openmpi", HERE, 18_200)),
    "mpirun in an allocation": (BATCH | MPI, Topology(1, 1, 2, 2, 0, "openmpi", HERE, 10_001)),
    "mpirun, its daemons started by srun": (
        STEP | MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "MASTER_PORT": "12345"},
        Topology(3, 1, 4, 2, 0, "openmpi", "node1", 12_345),
    ),
    "mpirun of MPICH or Intel": (MPICH, Topology(3, 1, 4, 2, 0, "mpich", "node1", 10_000)),
    "mpirun of Intel in an allocation": (BATCH | MPICH, Topology(3, 1, 4, 2, 0, "mpich", "node1", 10_001)),
    "mpirun of Intel, its daemons started by srun": (
        STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | MPICH,
        Topology(3, 1, 4, 2, 0, "mpich", "node1", 10_001),
    ),
    "mpiexec of PALS": (PALS, Topology(3, 1, 4, 2, 1, "pals", "node1", 10_000 + crc32(b"4711.pbs") % 20_000)),
    "srun in a shell of salloc": (SALLOC | STEP, Topology(3, 1, 4, 2, 1, "slurm", "node1", 10_001)),
    "mpirun in a shell of salloc": (SALLOC | MPI, Topology(1, 1, 2, 2, 0, "openmpi", HERE, 10_001)),
    "mp.spawn": (HAND, Topology(1, 1, 2, 2, 0, "env", HERE, 29_500)),
    "mp.spawn on two nodes": (
        HAND | variables("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=node1"),
        Topology(3, 1, 4, 2, 1, "env", "node1", 29_500),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_launcher_is_read(name):
    env, expected = KNOWN[name]
    assert Topology.from_env(env) == expected


def test_the_environment_of_this_process_is_the_default(monkeypatch):
    assert Topology.from_env() == Topology()
    for name, value in HAND.items():
        monkeypatch.setenv(name, value)
    assert Topology.from_env().launcher == "env"


@pytest.mark.parametrize("size", [2, 7])
def test_all_ranks_of_a_step_take_one_port_outside_the_ephemeral_range(size):
    ports = set()
    for rank in range(size):
        ids = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_JOB_ID": "4242",
        }
        ports.add(Topology.from_env(STEP | ids).master_port)
    assert len(ports) == 1 and 1024 <= ports.pop() < 32_768


def test_tasks_of_one_array_take_different_ports():
    # A 3-task array was given these job ids; the array's own id is shared.
    ports = {
        Topology.from_env(STEP | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_JOB_ID": job}).master_port
        for job in ("11", "12", "10")
    }
    assert len(ports) == 3


def test_two_mpiruns_take_different_ports_and_their_ranks_one():
    ids = ({"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in "01")
    first, peer = (Topology.from_env(MPI | env).master_port for env in ids)
    assert first == peer != Topology.from_env(MPI | {"PMIX_NAMESPACE": "1973354498"}).master_port


@pytest.mark.parametrize(
    "env", [STEP, MPI, TORCHRUN, HAND, BATCH | MPI], ids=["step", "mpi", "torchrun", "hand", "both"]
)
def test_an_exported_port_wins(env):
    assert Topology.from_env(env | {"MASTER_PORT": "12321"}).master_port == 12_321


def without(env, name):
    return {key: value for key, value in env.items() if key != name}


EXPORT = "export neither"
WRONG = {  # environment, and what the line must say
    "RANK without WORLD_SIZE": (without(HAND, "WORLD_SIZE"), ["env: ", "['1', '1', '']", EXPORT]),
    "WORLD_SIZE without RANK": (without(HAND, "RANK"), ["single: ", "['0', '0', '1']", "['0', '0', '2']", EXPORT]),
    "no LOCAL_RANK": (without(HAND, "LOCAL_RANK"), ["env: ", "['1', '', '2']", EXPORT]),
    "torchrun without RANK": (without(TORCHRUN, "RANK"), ["torchrun: ", "['', '0', '4']", EXPORT]),
    "step without PROCID": (without(STEP, "SLURM_PROCID"), ["slurm: ", "['', '1', '4']", EXPORT]),
    "mpirun without its rank": (without(MPI, "OMPI_COMM_WORLD_RANK"), ["openmpi: ", "['', '1', '2']", EXPORT]),
    "MPICH without its size": (without(MPICH, "PMI_SIZE"), ["mpich: ", "['3', '1', '']", EXPORT]),
    "PALS without its rank": (without(PALS, "PMI_RANK"), ["pals: ", "['', '1', '4']", EXPORT]),
    "RANK = WORLD_SIZE": (HAND | {"RANK": "2"}, ["env: ", "['2', '1', '2']"]),
    "RANK > WORLD_SIZE": (TORCHRUN | {"RANK": "9"}, ["torchrun: ", "['9', '0', '4']"]),
    "PROCID = NUM_TASKS": (STEP | {"SLURM_PROCID": "4"}, ["slurm: ", "['4', '1', '4']"]),
    "no ranks": (HAND | {"WORLD_SIZE": "0", "RANK": "0", "LOCAL_RANK": "0"}, ["env: ", "['0', '0', '0']"]),
    "local rank too high": (TORCHRUN | {"LOCAL_RANK": "2"}, ["local rank 2 of 2"]),
    "WORLD_SIZE in a batch body": (BATCH | {"WORLD_SIZE": "4"}, ["single: ", "['0', '0', '1']", "['0', '0', '4']"]),
    "WORLD_SIZE in a step": (STEP | {"WORLD_SIZE": "2"}, ["slurm: ", "['3', '1', '4']", "['3', '1', '2']", EXPORT]),
    "WORLD_SIZE under mpirun": (MPI | {"WORLD_SIZE": "4"}, ["openmpi: ", "['1', '1', '2']", "['1', '1', '4']"]),
    # export RANK=$SLURM_PROCID in the batch body: it is 0 there, and so in every task.
    "exported RANK": (STEP | {"RANK": "0"}, ["slurm: ", "['3', '1', '4']", "['0', '1', '4']", EXPORT]),
    "several nodes, no address": (without(STEP, "MASTER_ADDR"), ["MASTER_ADDR"]),
    "several nodes, empty address": (STEP | {"MASTER_ADDR": ""}, ["MASTER_ADDR"]),
    "two lines in an address": (STEP | {"MASTER_ADDR": "a\nb"}, ["MASTER_ADDR"]),
    "port too high": (HAND | {"MASTER_PORT": "65536"}, ["MASTER_PORT", "65536"]),
    "port 0": (HAND | {"MASTER_PORT": "0"}, ["MASTER_PORT", "0"]),
    "two lines in a value": (HAND | {"RANK": "1\n2"}, ["env: ", "['1\\n2', '1', '2']"]),
}
NO_NUMBERS = [
    "-1",
    "one",
    "",
    " ",
    "1.5",
    "0x1",
    "+1",
    "\u00b2",
    "\u0661",
    "1_0",
    "9" * 30,
    "9" * 5000,
]  # and two digits that are not ASCII


@pytest.mark.parametrize("name", WRONG)
def test_a_contradiction_stops_with_one_line(name, capsys):
    env, parts = WRONG[name]
    with pytest.raises(SystemExit) as stopped:
        Topology.from_env(env)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in err


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value[:6]))
@pytest.mark.parametrize(
    ("env", "variable"),
    [
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
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_number_stops_with_one_line(env, variable, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        Topology.from_env(env | {variable: value})
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1) and repr(value) in err


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value[:6]))
@pytest.mark.parametrize(
    ("env", "variable"),
    [(HAND, "MASTER_PORT"), (STEP, "SLURM_JOB_ID"), (STEP, "SLURM_NODEID"), (MPICH, "MPI_LOCALNRANKS")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_number_beside_them_is_named(env, variable, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        Topology.from_env(env | {variable: value})
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert re.match(rf"{variable} is {re.escape(repr(value))}, ", err)


# ---- answers()


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_whether_rank_0_answers_at_an_address_of_either_family(address, family):
    with closing(socket.create_server((address, 0), family=family)) as server:
        here = Topology(master_addr=address, master_port=server.getsockname()[1])
        assert here.answers()
    assert not here.answers()


def test_a_name_that_nobody_knows_is_an_error():
    with pytest.raises(OSError):
        Topology(master_addr="no.such.host.invalid", master_port=9).answers()


# ---- device(): a machine without a GPU can only be told that it has some


@pytest.fixture
def gpus(monkeypatch):
    """Say how many GPUs torch sees; `claimed` then holds the one that was set."""
    claimed = []

    def see(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: claimed[-1])
        return claimed

    return see


@pytest.fixture
def threads():
    """Give torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_env(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return Topology.from_env()


ALONE = without(STEP, "CUDA_VISIBLE_DEVICES") | {"CUDA_VISIBLE_DEVICES": "0"}  # --gpus-per-task=1
CLAIMS = {  # environment, GPUs that torch sees, which is claimed
    "single": ({}, 2, 0),
    "batch body": (BATCH, 2, 0),
    "torchrun": (TORCHRUN | {"LOCAL_RANK": "1"}, 2, 1),
    "torchrun, more GPUs than ranks": (TORCHRUN | {"LOCAL_RANK": "1"}, 8, 1),
    "torchrun, one each": (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 1, 0),
    "step": (STEP, 2, 1),
    "step, each task sees its own": (ALONE, 1, 0),
    "step, uneven nodes": (UNEVEN | {"SLURM_GPUS_ON_NODE": "3"}, 3, 2),
    "mpirun": (MPI, 2, 1),
    "mpirun of Intel": (MPICH, 2, 1),
    "mpiexec of PALS": (PALS, 2, 1),
    "shell of salloc": (SALLOC, 2, 0),
    "mpirun, a wrapper shows each rank its own": (MPI | {"CUDA_VISIBLE_DEVICES": "1"}, 1, 0),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_local_rank_claims_its_gpu(name, gpus, monkeypatch):
    env, count, index = CLAIMS[name]
    claimed = gpus(count)
    assert with_env(monkeypatch, env).device() == torch.device("cuda", index)
    assert claimed == [index]


TOO_FEW = {  # environment, GPUs that torch sees, what the line names
    "two torchrun ranks, one GPU": (TORCHRUN | {"LOCAL_RANK": "1"}, 1, ["local rank 1", "1 GPUs", "--no-cuda"]),
    "two tasks, a job of one GPU": (STEP | {"SLURM_GPUS_ON_NODE": "1"}, 1, ["local rank 1", "1 GPUs", "--no-cuda"]),
    "two mpirun ranks, one GPU": (MPI, 1, ["local rank 1", "1 GPUs", "--no-cuda"]),
    "two hand-made ranks, one GPU": (HAND, 1, ["local rank 1", "1 GPUs", "--no-cuda"]),
    "three tasks, two GPUs": (UNEVEN, 2, ["local rank 2", "2 GPUs", "--no-cuda"]),
    "a job with GPUs, a torch without": (STEP, 0, ["SLURM_GPUS_ON_NODE=2", "--no-cuda"]),
    "a batch body with GPUs, a torch without": (BATCH, 0, ["SLURM_GPUS_ON_NODE=2", "--no-cuda"]),
}


@pytest.mark.parametrize("name", TOO_FEW)
def test_too_few_gpus_stop_with_one_line(name, gpus, monkeypatch, capsys):
    env, count, parts = TOO_FEW[name]
    claimed = gpus(count)
    me = with_env(monkeypatch, env)
    with pytest.raises(SystemExit) as stopped:
        me.device()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n"), claimed) == (2, "", 1, [])
    for part in parts:
        assert part in err


def test_no_cuda_takes_the_cpu_even_where_a_job_has_gpus(gpus, monkeypatch, threads):
    for count in (0, 1, 2):
        assert gpus(count) == []
        assert with_env(monkeypatch, STEP).device(cuda=False) == torch.device("cpu")


def test_on_a_cpu_torch_takes_the_threads_that_the_rank_has(gpus, monkeypatch, threads):
    gpus(0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert with_env(monkeypatch, HAND).device() == torch.device("cpu")
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch has read it when it started: what it made of it stays
    torch.set_num_threads(1)
    Topology.from_env().device()
    assert torch.get_num_threads() == 1


CPUS = {  # environment, CPUs that this process may use, CPUs of the rank
    "single": ({}, 8, 8),
    "torchrun: the node's, shared": (TORCHRUN | {"SLURM_CPUS_PER_TASK": "16"}, 16, 8),
    "more ranks than CPUs": (HAND, 1, 1),
    "odd ones are left over": (HAND, 7, 3),
    "step": (STEP | {"SLURM_CPUS_PER_TASK": "3"}, 8, 3),
    "step without --cpus-per-task": (without(STEP, "SLURM_CPUS_PER_TASK"), 8, 1),
    "step that srun gave fewer": (STEP | {"SLURM_CPUS_PER_TASK": "8"}, 2, 2),
    "mpirun": (MPI, 4, 2),
    "batch body": (BATCH, 4, 4),
}


@pytest.mark.parametrize("name", CPUS)
def test_cpus_of_a_rank(name, monkeypatch):
    env, usable, expected = CPUS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    assert with_env(monkeypatch, env).cpus() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can pin a process")
def test_cpus_are_those_of_this_process_and_not_of_the_machine():
    mine = os.sched_getaffinity(0)
    assert Topology().cpus() == len(mine)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert Topology().cpus() == 1
    finally:
        os.sched_setaffinity(0, mine)
