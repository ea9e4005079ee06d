"""Simulated GPUs beyond one command: on Slurm's nodes and beneath the course; what each rank, and nvidia-smi, says."""

import os
import re
import subprocess
import sys

import pytest
from clusters import make_cluster, need_slurm, our_python, program, remove
from doctor_table import red, rows_of
from real import LIMIT
from refusals import one_line
from simulated import run

from ddp_helpers import ROOT
from ddp_helpers.launch.launchers import free_port

# ---- the local Slurm


@pytest.fixture
def cluster():
    """A cluster that is down."""
    need_slurm()
    made = make_cluster()
    yield made
    remove(made)


def tables(said):
    """The doctor's tables in a text."""
    return re.findall(r"(?m)^check .*\n(?:.*\n)*?(?:all \d+ checks ok|\d+ checks: \d+ failed)$", said)


def test_slurms_two_nodes_have_gpus_of_their_own_and_nccl_joins_them(simulated_gpus, cluster, tmp_path):
    """On each node rank 0 of the node has GPU 0. The control: two ranks on one GPU of one node."""
    doctor = f"'{sys.executable}' -m ddp_helpers doctor --data none --run-dir '{tmp_path}' --timeout {LIMIT}"
    script = f"""
sinfo -hN -o '%N %G'
srun --nodes=2 --gpus-per-node=2 bash -c 'echo $SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES'
srun --nodes=2 --ntasks-per-node=2 --gres=gpu:2 {doctor}
srun --nodes=1 --ntasks=2 --gres=gpu:1 {doctor}
"""
    env = {**cluster.env(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    lean = {name: env[name] for name in ("HOME", "XDG_STATE_HOME", "MASTER_ADDR", "MASTER_PORT")}
    done = run(simulated_gpus, [cluster.home / "cluster", "with", "bash", "-c", script], memory_mb=256, **lean)
    assert done.stdout.startswith("node1 gpu:2\nnode2 gpu:2\n"), done.stderr
    assert sorted(re.findall("(node.) sees (.*)", done.stdout)) == [("node1", "0,1"), ("node2", "0,1")]
    four, shared = tables(done.stdout)
    rows, _ = rows_of(four.splitlines())
    assert red(four) == {} and rows["devices"][1] == "cuda:0 (simulated); cuda:1 (simulated)", four
    assert "right sums over ProcessGroupNCCL" in rows["all-reduce"][1] and " ms" not in rows["all-reduce"][1]
    said = re.findall(r"(?m)^rank (\d): simulated GPU (\d) of (node\d), computed on the CPU$", done.stderr)
    four_ranks = [("0", "0", "node1"), ("1", "1", "node1"), ("2", "0", "node2"), ("3", "1", "node2")]
    assert sorted(set(said) & set(four_ranks)) == four_ranks
    assert "is shared" in red(shared)["devices"][0], shared


def test_a_slurm_that_is_up_with_other_gpus_is_not_taken(cluster):
    cluster.up()
    same, other = (cluster("with", "echo", "ran", SIMULATED_GPUS=number) for number in "23")
    assert (same.returncode, same.stdout) == (0, "ran\n")
    assert (other.returncode, other.stdout) == (1, "")
    one_line(other.stderr, "gpu:2", "gpu:3", "slurm/cluster down")


# ---- the course


@pytest.mark.parametrize("target", ["run", "run-all", "lab"])
def test_make_gives_the_course_so_many_gpus_and_none_unasked(target, tmp_path, simulated_gpus):
    """The course, which would run for minutes, is a shell here that says what it sees."""
    our_python(tmp_path / "module", f"PYTHONPATH='{ROOT}'")
    program(tmp_path / "ddp-course", f'exec "{tmp_path}/module" -m ddp_helpers "$1" "$2" --beside-real-gpus "${{@:3}}"')
    program(tmp_path / "python", 'echo "$SIMULATED_GPUS GPUs: ${LD_PRELOAD:+preloaded}"')
    program(tmp_path / "jupyter", "true")
    command = [
        "make",
        "--no-print-directory",
        "-o",
        ".venv/installed",
        "-o",
        "system",
        "-o",
        "staged",
        f"BIN={tmp_path}",
        "SLURM=",
        target,
    ]
    env = os.environ | {"XDG_CACHE_HOME": str(simulated_gpus)}
    said = [
        subprocess.run([*command, *gpus], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT, check=True)
        for gpus in (["GPUS=3"], [])
    ]
    assert [each.stdout for each in said] == ["3 GPUs: preloaded\n", " GPUs: \n"]


# ---- what is said

FORKS = """
import ctypes, os, torch
runtime, room = ctypes.CDLL(None), ctypes.c_void_p()
torch.cuda.device_count()
if not os.fork():  # a worker, before anything was used: it is the first
    runtime.cudaMalloc(ctypes.byref(room), 8)
    os._exit(0)
os.wait()
torch.ones(1, device="cuda:1")
torch.ones(1, device="cuda:0")
if not os.fork():  # a worker, afterwards
    runtime.cudaMalloc(ctypes.byref(room), 8)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    ("variable", "who"), [("RANK", "rank 1: "), ("OMPI_COMM_WORLD_RANK", "rank 1: "), ("NONE", "")]
)
def test_a_process_says_once_that_its_gpu_is_simulated_and_those_that_it_forks_do_not(variable, who, simulated_gpus):
    done = run(simulated_gpus, [sys.executable, "-c", FORKS], **{variable: "1"})
    said = [f"{who}simulated GPU {gpu}, computed on the CPU" for gpu in (0, 1)]
    assert done.stderr.splitlines()[1:] == said, done.stderr
    idle = run(simulated_gpus, [sys.executable, "-c", "import torch; torch.cuda.device_count()"])
    assert len(idle.stderr.splitlines()) == 1, "who uses none"


# ---- nvidia-smi

FIELDS = "name,driver_version,compute_cap,compute_mode,mig.mode.current,memory.total"  # as `make gpu` asks
SMI = {  # the words after nvidia-smi, and its lines
    f"--query-gpu={FIELDS} --format=csv,noheader": ["simulated GPU, [N/A], 9.0, Default, [N/A], 64 MiB"] * 2,
    "--query-gpu=index,utilization.gpu,power.draw --format=csv": [
        "index, utilization.gpu, power.draw",
        "0, [N/A], [N/A]",
        "1, [N/A], [N/A]",
    ],
    "--query-gpu=memory.total --format=csv,noheader,nounits --id=1": ["64"],
}
UNKNOWN = ["topo -m", "-q", "--query-gpu=fan.speed --format=csv,noheader", "--id=2 -L", "--query-gpu=index -lms 500"]


def test_nvidia_smi_lists_them_and_refuses_in_one_line_what_they_do_not_have(simulated_gpus):
    script = "".join(f"nvidia-smi {words}; echo = $?\n" for words in ["", "-L", *SMI, *UNKNOWN])
    uuids = "; ".join(f"print(torch.cuda.get_device_properties({gpu}).uuid)" for gpu in range(2))
    script += "SLURMD_NODENAME=node1 nvidia-smi -L\nexport SLURMD_NODENAME=node1\n"
    script += f"'{sys.executable}' -c 'import torch; {uuids}'"
    done = run(simulated_gpus, ["bash", "-c", script])
    table, listed, *rest = re.split(r"= (\d)\n", done.stdout)[::2]
    statuses = re.findall(r"(?m)^= (\d)$", done.stdout)
    assert "simulated" in table and len(re.findall("(?m)^. [01]  simulated GPU . 64 MiB", table)) == 2
    assert re.findall(r"GPU (\d): simulated GPU \(UUID: GPU-0\d", listed) == ["0", "1"]
    assert [lines.splitlines() for lines in rest[: len(SMI)]] == list(SMI.values())
    assert statuses == ["0"] * (2 + len(SMI)) + ["6"] * len(UNKNOWN) and "".join(rest[len(SMI) : -1]) == ""
    named, ours = re.findall(r"UUID: GPU-(.*)\)", rest[-1]), rest[-1].splitlines()[2:]
    assert named == ours and len({*named, *re.findall(r"UUID: GPU-(.*)\)", listed)}) == 4, "and of a node others"
    refusals = done.stderr.splitlines()[1:]
    assert len(refusals) == len(UNKNOWN) and all("simulated" in line and "-L" in line for line in refusals), done.stderr
