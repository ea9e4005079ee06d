"""The doctor: green where all is well, and red, with the rank and a cure, for each part that is taken away."""

import json
import os
import re
import shutil
import socket
from argparse import Namespace
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from doctor_table import red, rows_of, seen_by
from faults.ranks import Ranks
from real import LIMIT, need_launcher, python, weekly
from refusals import ended

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.launch import launch
from ddp_helpers.rank import scripts
from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.doctor.case import Case, capture
from ddp_helpers.rank.doctor.checks import CHECKS, TOGETHER


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script that one takes home."""
    return scripts.write_script("doctor", tmp_path_factory.mktemp("script") / "doctor.py")


@pytest.fixture
def examined(script, digits, tmp_path, tmp_path_factory):
    """Start these ranks by hand, each a number, flags and variables; for each its exit status, and what it said."""

    def run(*ranks, size=2, program=script, **env):
        env = {"MASTER_PORT": launch.free_port(), "WORLD_SIZE": size} | env
        with ExitStack() as stack:
            started = []
            for rank, flags, *own in ranks:
                flags = ["--data", digits, "--run-dir", tmp_path, *flags]  # of two the last counts
                env |= {"RANK": rank, "LOCAL_RANK": rank}
                here = Ranks(program, flags, 1, tmp_path_factory.mktemp("rank"), env=env | dict(*own))
                started.append(stack.enter_context(here))
            ends = [each.wait() for each in started]
        return [(end.statuses[0], "\n".join(filter(None, end.said[0].splitlines()))) for end in ends]

    return run


# ---- green


def test_alone_it_is_green_and_leaves_nothing(tmp_path, digits, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_MNIST_ROOT", str(digits))
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    out, err = capfd.readouterr()
    assert end.value.code == 0 and red(out) == {} and not err
    assert re.search(r"^ranks .*\b1 rank .*\b1 host\b", out, re.M)
    assert list(tmp_path.iterdir()) == []  # nor the folder for runs


@pytest.mark.parametrize("folder", [ROOT, None], ids=["in the course", "elsewhere"])
def test_it_looks_where_runs_go(folder, tmp_path, digits):
    """DDP_RUNS may be a disk that is full, or of another person, where the folder in which one is has room."""
    env = {"PYTHONPATH": str(ROOT), "DDP_MNIST_ROOT": str(digits), "DDP_RUNS": str(tmp_path / ("x" * 300))}
    done = python("-m", "ddp_helpers", "doctor", cwd=folder or tmp_path, env=os.environ | env)
    seen, cure = red(done.stdout)["run folder"]
    assert done.returncode == 1 and "xxx" in seen and "too long" in seen and "--run-dir" in cure


def test_two_ranks_are_green_and_rank_0_says_it(examined, tmp_path):
    flags = ["--run-dir", tmp_path / "a" / "b"]
    (status, said), other = examined((0, flags), (1, flags))
    assert (status, other) == (0, (0, "")) and red(said) == {}
    rows, _ = rows_of(said.splitlines())
    assert "2 ranks on 1 host" in rows["ranks"][1] and "right sums" in rows["all-reduce"][1]
    ms, busbw = map(float, re.search(r"16 MB ([\d.e+]+) ms; busbw ([\d.]+) GB/s", rows["all-reduce"][1]).groups())
    assert busbw == pytest.approx(2**24 / ms / 1e6, rel=0.01, abs=0.006), "each rank sends and receives all bytes once"
    assert f"torch {torch.__version__}" in rows["versions"][1] and list(tmp_path.iterdir()) == []


@weekly  # under torchrun it is green in test_wheel, and under srun it is red in test_pages, in a job
@pytest.mark.parametrize(("launcher", "ranks", "by"), [("mpirun", 2, "openmpi"), ("srun", (1, 1), "slurm")])
def test_it_is_green_under(launcher, ranks, by, request, tmp_path, digits):
    need_launcher(request, launcher)
    words = ["-m", "ddp_helpers", "doctor", "--data", digits, "--run-dir", tmp_path, "--timeout", LIMIT]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
    done = launch.run(*words, ranks=ranks, launcher=launcher, timeout=LIMIT, env=meet)
    assert red("\n".join(done.of(0))) == {} and by in done.of(0)[1]


# ---- red, with the cure


def test_what_is_wrong_with_rank_1_only_is_in_rank_0s_table(examined, tmp_path, digits):
    data = shutil.copytree(digits, tmp_path / "data")
    (data / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    runs = ["--run-dir", tmp_path / "runs"]
    table = tmp_path.parent / f"{tmp_path.name}.json"
    mine = [*runs, "--json", table]
    (status, said), other = examined((0, mine), (1, [*mine, "--data", data, "--num-workers", 999]))
    assert (status, other) == (1, (1, ""))
    red_rows = red(said)
    rows = {row["name"]: row["verdict"] for row in json.loads(table.read_text())["rows"]}
    assert rows == {name: "FAIL" if name in red_rows else "ok" for name in CHECKS}
    assert list(red_rows) == ["cpus", "data"]
    seen, cure = red_rows["cpus"]
    assert seen.startswith("rank 1: ") and "--num-workers 999" in seen and "more --cpus-per-task" in cure
    seen, _ = red_rows["data"]
    assert seen.startswith("rank 1: ") and "t10k-labels-idx1-ubyte is missing" in seen
    assert f"download_data.py --data {data}" in seen
    assert list(tmp_path.iterdir()) == [data]


def without(text):
    """The red rows of the table where some ranks are missing."""
    rows, last = rows_of(text.splitlines())
    red_rows = {name: row[1:] for name, row in rows.items() if row[0] == "FAIL"}
    assert list(rows) == [name for name in CHECKS if name not in TOGETHER]
    assert last == f"{len(rows)} checks: {len(red_rows)} failed"
    return red_rows


def test_a_missing_rank_is_red(examined, tmp_path):
    short = ["--timeout", 10]
    (status, said), other = examined((0, short), (1, [*short, "--data", tmp_path]), size=3)
    red_rows = without(said)
    assert list(red_rows) == ["ranks", "data"], "rank 1's faults are known, too"
    assert red_rows["ranks"][0].startswith("rank 2 of 3 ")
    assert red_rows["data"][0].startswith(f"rank 1: --data {tmp_path}: ")
    assert (status, other) == (1, (1, ""))


def test_who_finds_no_rank_0_or_a_stranger_who_never_answers_says_so_in_one_line(examined):
    with closing(socket.create_server(("127.0.0.1", 0))) as stranger:
        ports = [launch.free_port(), stranger.getsockname()[1]]
        alone = examined(*((1, ["--timeout", 2], {"MASTER_PORT": port}) for port in ports))
    for port, (status, said) in zip(ports, alone, strict=True):
        ended(status, "", f"{said}\n", f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}", "rank 0", "another program")


def test_a_meeting_point_that_is_taken_or_that_nobody_exported_or_knows_is_red(examined):
    with closing(socket.create_server(("", 0))) as stranger:
        places = [("MASTER_ADDR", ""), ("MASTER_ADDR", "nobody.invalid"), ("MASTER_PORT", "65536")]
        places += [("MASTER_PORT", "x"), ("MASTER_PORT", str(stranger.getsockname()[1]))]
        alone = examined(*((0, ["--timeout", 2], {name: value}) for name, value in places))
    for (name, value), (status, said) in zip(places, alone, strict=True):
        red_rows = without(said)
        assert status == 1 and list(red_rows) == ["ranks"], said
        seen, cure = red_rows["ranks"]
        assert f"{name}={value}" in seen and "export MASTER_ADDR" in cure, said


def test_an_interface_that_is_not_there_is_a_red_sum(examined):
    (status, said), (other, _) = examined((0, []), (1, []), GLOO_SOCKET_IFNAME="nowhere0")
    red_rows = red(said)
    assert (status, other) == (1, 1) and list(red_rows) == ["all-reduce"]
    seen, cure = red_rows["all-reduce"]
    assert seen.startswith("all ranks: ") and "GLOO_SOCKET_IFNAME is nowhere0, and there are lo" in seen
    assert "the interface between the nodes" in cure


PATCHED = """
import os, torch
from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.scripts import doctor
if os.environ["RANK"] == "1":
    full = torch.full
    torch.full = lambda size, value, **more: full(size, 7.0, **more)
    checks.torchvision.__version__ = "0.0"
doctor.main()
"""
LOST = """
import os, sys
from ddp_helpers.rank.scripts import doctor
dies = lambda case: os._exit(9) if case.rank else right(case)
right, *more = doctor.CHECKS["all-reduce"]
doctor.CHECKS["all-reduce"] = dies, *more
doctor.main()
"""


def test_a_wrong_sum_and_another_version_are_red(examined, tmp_path):
    """The negative control of what is green in every other test."""
    (tmp_path / "patched.py").write_text(PATCHED)
    (status, said), (other, _) = examined((0, []), (1, []), program=tmp_path / "patched.py")
    red_rows = red(said)
    assert (status, other) == (1, 1) and list(red_rows) == ["versions", "all-reduce"]
    seen, _ = red_rows["versions"]
    assert seen.startswith("rank 1: python ") and ", torchvision 0.0, but rank 0 has python " in seen
    assert re.match(r"all ranks: .*\b2 ranks\b.*\b8\b.*\b3", red_rows["all-reduce"][0])  # 1 + 7, and not 1 + 2


def test_a_rank_that_dies_on_the_way_is_named_and_holds_nobody(examined, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    flags = ["--timeout", 3]
    (status, said), (other, _) = examined((0, flags), (1, flags), program=tmp_path / "lost.py")
    assert (status, other) == (1, 9)
    assert red(said[said.index("check  ") :])["ranks"][0].startswith("rank 1 of 2 ")  # torch may warn before
    assert [path.name for path in tmp_path.iterdir()] == ["lost.py"]


# ---- single rows, of ranks that share a store and differ in what they are told


A, B, BOTH = {"gpus": "A"}, {"gpus": "B"}, {"gpus": "AB"}
TORCHRUN = {"env": {"TORCHELASTIC_RUN_ID": "1"}}
OLD_DRIVER = {"trouble": RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease")}
ONE, TWO = {"host": "one", "local_rank": 0}, {"host": "two", "local_rank": 0}
SHARED = {"cpus": 2, "first": 0}
DOCKER = 64 * 2**20
SALLOC = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}
# check, ranks, what the row must say; first what is right, then what is wrong with it.
RIGHT = {
    "two hosts": ("ranks", [ONE, TWO], "2 ranks on 2 hosts"),
    "one task": ("ranks", [{"launcher": "slurm", "env": {"SLURM_NTASKS": "1"}}], "1 rank on 1 host, started by slurm"),
    "a GPU each": ("devices", [BOTH, BOTH], "cuda:0; cuda:1"),
    "a hidden GPU each": ("devices", [A, B], "cuda:0"),  # each task is shown one GPU, its cuda:0
    "one number on two hosts": ("devices", [A | ONE, A | TWO], "cuda:0"),
    "no GPU": ("devices", [{}, {}], "cpu"),
    "a CPU each": ("cpus", [{}, {}], "each rank's own: 1"),
    "two CPUs for two": ("cpus", [SHARED, SHARED], "each rank's own: 1"),
    "two nodes on one machine": (
        "cpus",
        [SHARED | {"workers": 1}, SHARED | {"workers": 1, "env": {"SLURM_NODEID": "1", "OMP_NUM_THREADS": "2"}}],
        "each rank's own: 2",
    ),
    "six CPUs for six": (
        "cpus",
        [{"cpus": 6, "first": 0}] * 6,
        "each rank's own: 1",
    ),  # six sixths are a bit less than 1
    "tasks on one machine": ("cpus", [SHARED | {"launcher": "slurm"}] * 4, "each rank's own: 1"),
    "a network": ("network", [ONE | {"address": "10.0.0.1"}, TWO | {"address": "fe80::1"}], "one is 10.0.0.1; two is"),
    "one dataset": ("data", [{}, {}], "MNIST 0, complete on each rank"),
    "space": ("run folder", [{}, {"free": 10**9}], "wrote for runs; 1100 GB free; "),
    "Docker's default, and nobody needs it": ("/dev/shm", [{"free": DOCKER}], "64 MB free"),
    "one rank with a GPU": ("/dev/shm", [A | {"free": DOCKER}], "64 MB free"),
    "more than Docker's default": ("/dev/shm", [A | {"free": DOCKER + 1}, B | {"free": DOCKER + 1, "workers": 9}], ""),
}
WRONG = {  # check, ranks, the beginning of what was seen, a part of the cure
    "srun forgotten in a shell of salloc": (
        "ranks",
        [{"launcher": "slurm", "env": SALLOC}],
        "rank 0: alone, but the job has SLURM_NTASKS=4",
        "srun",
    ),
    "one GPU for two": ("devices", [A, A], "all ranks: GPU A on here is shared", "with MIG one slice per rank"),
    "two of three": ("devices", [A, B, B], "ranks 1, 2: GPU B on here is shared", "a GPU for each task"),
    "a GPU for one": ("devices", [A, {}], "rank 1: no GPU, but other ranks have one", "--no-cuda"),
    "too few GPUs": ("devices", [BOTH] * 3, "rank 2: local rank 2 has no GPU (2 here)", "a GPU for each task"),
    "one GPU under torchrun": ("devices", [A | TORCHRUN] * 2, "rank 1: local rank 1 has no GPU (1 here)", "--no-cuda"),
    "too old a driver": ("devices", [A | OLD_DRIVER], "rank 0: the CPU is used, and not the GPU: The NVIDIA", "torch"),
    "one CPU for two": ("cpus", [{}, {"first": 0}], "all ranks: CPUs of its own: 0", "fewer ranks per node"),
    "a worker too many": ("cpus", [{"workers": 1}] * 2, "all ranks: CPUs of its own: 1", "fewer --num-workers"),
    "no number": ("cpus", [{"env": {"SLURM_CPUS_PER_TASK": "two"}}], "rank 0: invalid literal", "--cpus-per-task"),
    "not inherited": (
        "cpus",
        [{"env": {"SLURM_CPUS_PER_TASK": "4"}}],
        "rank 0: CPUs: 1, but --cpus-per-task=4",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"',
    ),
    "too many threads": (
        "cpus",
        [{"env": {"OMP_NUM_THREADS": "4"}}],
        "rank 0: CPUs of its own: 1, too few with --num-workers 0, and OMP_NUM_THREADS=4",
        "a smaller OMP_NUM_THREADS",
    ),
    "a machine that does not know itself": (
        "network",
        [{}, {}],
        "all ranks: here, this machine's name, has no address: torchrun waits minutes for it",
        "/etc/hosts: 127.0.1.1 and the name; or torchrun --standalone --local-addr=localhost",
    ),
    "other digits": (
        "data",
        [{}, {"data": "digits"}],
        "rank 1: digits 0, complete on each rank, but rank 0 has MNIST 0",
        "",
    ),
    "no data on rank 0": ("data", [{"data": ""}, {}], "rank 0: Get it.", "one --data"),
    "no space": ("run folder", [{}, {"free": 10**9 - 10**7}], "rank 1: 0.99 GB free for runs", "with 1 GB"),
    "a folder that cannot be written": ("run folder", [{"full": 1}, {}], "rank 0: runs cannot be written: is full", ""),
    "no shared memory": ("/dev/shm", [{"free": 2**25, "workers": 2}], "rank 0: 32 MB for --num-workers 2", "--shm"),
    "Docker's default for workers": ("/dev/shm", [{"free": DOCKER, "workers": 1}], "rank 0: 64 MB for --num", "--shm"),
    "Docker's default for NCCL": ("/dev/shm", [A | {"free": DOCKER}, B], "rank 0: 64 MB for NCCL", "--shm-size"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_row_is_green(case):
    name, everyone, seen = RIGHT[case]
    row = seen_by(name, *everyone)
    assert row[0] == name and seen in row[1] and row[1] and not row[2]


@pytest.mark.parametrize("case", WRONG)
def test_a_row_is_red_with_the_rank_and_a_cure(case):
    name, everyone, seen, cure = WRONG[case]
    row = seen_by(name, *everyone)
    assert row[1].startswith(seen) and row[2] and cure in row[2], row


def folder_of(folder, rank=0, **plan):
    """What the row of the run folder says of a rank, given rank 0's plan, or made as rank 0 makes it."""
    case = Case("single", rank, rank, 1, Namespace(run_dir=folder))
    case.plan = plan or checks.make_plan(case, {0: {"devices": (["", "cpu"], "")}})
    seen, trouble = capture(lambda: checks.find_folder(case))
    Path(case.plan["file"] or "nowhere").unlink(missing_ok=True)
    return seen, trouble


def test_a_run_folder_that_cannot_be_or_that_each_node_has_for_itself_is_red_and_nothing_is_left(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        _, trouble = folder_of(folder)
        assert str(folder) in trouble and "Not a directory" in trouble
    _, trouble = folder_of(tmp_path, 1, file=str(tmp_path / ".doctor-elsewhere"), trouble="")
    assert str(tmp_path) in trouble and "rank 0" in trouble
    new = tmp_path / "new" / "runs"
    seen, trouble = folder_of(new)
    assert str(new) in seen and trouble == "" and [path.name for path in tmp_path.iterdir()] == ["file"]
