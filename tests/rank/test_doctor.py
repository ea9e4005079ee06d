"""The doctor: green under every launcher, and red, with a cure, for each part that is taken away."""

import os
import re
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from doctor_table import red, rows_of, seen_by
from faults.ranks import Ranks
from real import LIMIT, THOROUGH, python, weekly
from refusals import ended

from ddp_helpers.cli import main
from ddp_helpers.launch import launch, scripts
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture
from ddp_helpers.rank.doctor.checks import CHECKS, TOGETHER
from ddp_helpers.rank.launchers import stop


@pytest.fixture
def script(tmp_path):
    return scripts.write_script("doctor", tmp_path / "doctor.py")


@pytest.fixture
def by_hand(tmp_path_factory):
    """Start these ranks of a job, {rank: its flags}; give for each how it ended, and what it said."""

    def run(script, ranks, size, **env):
        env = {"MASTER_PORT": launch.free_port(), "WORLD_SIZE": size} | env
        with ExitStack() as stack:
            started = []
            for rank, flags in ranks.items():
                own = env | {"RANK": rank, "LOCAL_RANK": rank}
                started.append(stack.enter_context(Ranks(script, flags, 1, tmp_path_factory.mktemp("rank"), env=own)))
            ended = [each.wait() for each in started]
        # None as the status is a rank that was held; what `faults.ranks` adds is not the doctor's.
        lines = [[line for line in one.said[0].splitlines() if line and line[:6] != "left: "] for one in ended]
        return [Said(one.statuses[0], "\n".join(said)) for one, said in zip(ended, lines, strict=True)]

    return run


@dataclass
class Said:
    """How a rank ended, and what it said."""

    status: int | None
    out: str


# ---- green


def test_it_is_green_alone_and_leaves_nothing(tmp_path, digits):
    done = python("-m", "ddp_helpers", "doctor", cwd=tmp_path, env={**os.environ, "DDP_MNIST_ROOT": str(digits)})
    assert done.returncode == 0 and red(done.stdout) == {} and not done.stderr
    assert re.search(r"^ranks .*\b1 rank .*\b1 host\b", done.stdout, re.M)
    assert list(tmp_path.iterdir()) == []  # nor the folder for runs


def test_it_is_green_under_torchrun_started_from_a_notebook(script, tmp_path, digits):
    done = launch.run(script, "--data", digits, "--run-dir", tmp_path / "a" / "b", ranks=2, timeout=LIMIT)
    said = done.of(0)
    assert red("\n".join(said)) == {} and done.of(1) == []  # once, by rank 0
    rows, _ = rows_of(said)
    assert all(word in rows["ranks"][1] for word in ("2 ranks ", "1 host", "torchrun"))
    assert f"torch {torch.__version__}" in rows["versions"][1]
    assert all(word in rows["all-reduce"][1] for word in ("; 4 B ", ", 16 MB ", " ms; busbw "))
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.py"]


@weekly  # under srun it is green in test_pages, in a job
@pytest.mark.parametrize(("launcher", "ranks"), [("mpirun", 2), ("srun", (1, 1))])
def test_it_is_green_under(launcher, ranks, request, tmp_path, digits):
    request.getfixturevalue("mpirun" if launcher == "mpirun" else "cluster")
    words = ["-m", "ddp_helpers", "doctor", "--data", digits, "--run-dir", tmp_path, "--timeout", LIMIT]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
    done = launch.run(*words, ranks=ranks, launcher=launcher, timeout=LIMIT, env=meet)
    by = {"mpirun": "openmpi", "srun": "slurm"}[launcher]
    assert red("\n".join(done.of(0))) == {} and by in done.of(0)[1]


# ---- red, with the cure


@weekly  # that row alone is below
def test_a_cpu_that_srun_did_not_hand_on_is_red(cluster, tmp_path, digits):
    # Slurm 22.05 and 23.02 leave a task one CPU where the job asked for more.
    command = ["srun", "--nodes=1", "--cpus-per-task=2", "taskset", "-c", "0", sys.executable, "-m", "ddp_helpers"]
    command += ["doctor", "--data", str(digits), "--run-dir", str(tmp_path)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    red_rows = red(done.stdout)
    assert done.returncode == 1 and list(red_rows) == ["cpus"]
    assert red_rows["cpus"] == ("rank 0: CPUs: 1, but --cpus-per-task=2", 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"')


def test_what_is_wrong_with_rank_1_only_is_in_rank_0s_table(by_hand, script, tmp_path, digits):
    data = shutil.copytree(digits, tmp_path / "data")
    (data / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    flags = {0: ["--data", digits, "--run-dir", tmp_path / "runs"]}
    flags[1] = ["--data", data, *flags[0][2:], "--num-workers", 999]
    first, second = by_hand(script, flags, 2)
    assert (first.status, second.status, second.out) == (1, 1, "")
    red_rows = red(first.out)
    assert list(red_rows) == ["cpus", "data"]
    seen, cure = red_rows["cpus"]
    assert seen.startswith("rank 1: ") and "--num-workers 999" in seen and "more --cpus-per-task" in cure
    seen, _ = red_rows["data"]
    assert seen.startswith("rank 1: ") and "t10k-labels-idx1-ubyte is missing" in seen
    assert f"download_data.py --data {data}" in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.py"]


def test_damaged_data_and_a_folder_that_cannot_be_written_are_red(by_hand, script, tmp_path, digits):
    data = shutil.copytree(digits, tmp_path / "data")
    images = data / "MNIST" / "raw" / "train-images-idx3-ubyte"
    flipped = bytearray(images.read_bytes())
    flipped[-1] ^= 1
    images.write_bytes(flipped)
    (done,) = by_hand(script, {0: ["--data", data, "--run-dir", tmp_path / ("x" * 300)]}, 1)
    red_rows = red(done.out)
    assert done.status == 1 and list(red_rows) == ["data", "run folder"]
    seen, cure = red_rows["run folder"]
    assert "File name too long" in seen and "--run-dir" in cure
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.py"]
    assert f"{images} is cut short or damaged" in red_rows["data"][0]


def without(text):
    """The red rows of the table where some ranks are missing."""
    rows, last = rows_of(text.splitlines())
    red_rows = {name: row[1:] for name, row in rows.items() if row[0] == "RED"}
    assert list(rows) == [name for name in CHECKS if name not in TOGETHER]
    assert last == f"{len(red_rows)} of {len(rows)} checks RED"
    return red_rows


def test_a_missing_rank_is_red(by_hand, script, digits, tmp_path):
    flags = ["--data", digits, "--run-dir", tmp_path, "--timeout", 10]
    data = ["--data", tmp_path, *flags[2:]]
    first, second = by_hand(script, {0: flags, 1: data}, 3)
    red_rows = without(first.out)
    assert list(red_rows) == ["ranks", "data"], "rank 1's faults are known, too"
    assert re.fullmatch(r"rank 2 of 3 \w+ after 10 s", red_rows["ranks"][0])
    assert red_rows["data"][0].startswith(f"rank 1: --data {tmp_path}: ")
    assert (first.status, second.status, second.out) == (1, 1, "")


def test_a_missing_rank_0_is_one_line(by_hand, script, digits):
    (done,) = by_hand(script, {1: ["--data", digits, "--timeout", 2]}, 2)
    ended(done.status, "", f"{done.out}\n", "MASTER_ADDR=127.0.0.1 MASTER_PORT=", "rank 0")


def test_a_stranger_who_never_answers_is_one_line(by_hand, script, digits):
    with closing(socket.create_server(("127.0.0.1", 0))) as stranger:
        port = stranger.getsockname()[1]
        (done,) = by_hand(script, {1: ["--data", digits, "--timeout", 2]}, 2, MASTER_PORT=port)
    ended(done.status, "", f"{done.out}\n", "stranger")


def test_a_port_that_is_taken_is_red(by_hand, script, digits, tmp_path):
    with closing(socket.create_server(("", 0))) as stranger:
        port = stranger.getsockname()[1]
        (done,) = by_hand(script, {0: ["--data", digits, "--run-dir", tmp_path]}, 2, MASTER_PORT=port)
    red_rows = without(done.out)
    assert done.status == 1 and list(red_rows) == ["ranks"]
    assert f"MASTER_PORT={port}" in red_rows["ranks"][0] and "rank 0" in red_rows["ranks"][0]
    assert "MASTER_PORT" in red_rows["ranks"][1]


@pytest.mark.parametrize(
    "env", [{"MASTER_ADDR": ""}, {"MASTER_PORT": "65536"}, {"MASTER_PORT": "x"}, {"MASTER_ADDR": "nobody.invalid"}]
)
def test_a_meeting_point_that_nobody_exported_or_knows_is_red(by_hand, script, digits, tmp_path, env):
    (done,) = by_hand(script, {0: ["--data", digits, "--run-dir", tmp_path, "--timeout", 2]}, 2, **env)
    red_rows = without(done.out)
    assert done.status == 1 and list(red_rows) == ["ranks"]
    (name, value), (seen, cure) = *env.items(), red_rows["ranks"]
    assert f"{name}={value}" in seen and "exported" in cure


def test_an_interface_that_is_not_there_is_a_red_sum(by_hand, script, digits, tmp_path):
    flags = ["--data", digits, "--run-dir", tmp_path]
    first, second = by_hand(script, {0: flags, 1: flags}, 2, GLOO_SOCKET_IFNAME="nowhere0")
    red_rows = red(first.out)
    assert (first.status, second.status) == (1, 1) and list(red_rows) == ["all-reduce"]
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
right, *more = doctor.CHECKS["WHERE"]
doctor.CHECKS["WHERE"] = dies, *more
doctor.main()
"""


def patched(by_hand, tmp_path, code, *flags):
    """Two ranks of a doctor that was tampered with, and how each ended."""
    (tmp_path / "patched.py").write_text(code)
    return by_hand(tmp_path / "patched.py", dict.fromkeys(range(2), flags), 2)


def test_a_wrong_sum_and_another_version_are_red(by_hand, tmp_path, digits):
    # The negative control of what is green in every other test.
    first, second = patched(by_hand, tmp_path, PATCHED, "--data", digits, "--run-dir", tmp_path)
    red_rows = red(first.out)
    assert (first.status, second.status) == (1, 1) and list(red_rows) == ["versions", "all-reduce"]
    seen, _ = red_rows["versions"]
    assert seen.startswith("rank 1: python ") and ", torchvision 0.0, where rank 0 has python " in seen
    assert re.match(r"all ranks: .*\b2 ranks\b.*\b8\b.*\b3", red_rows["all-reduce"][0])  # 1 + 7, and not 1 + 2


@pytest.mark.parametrize("where", ["all-reduce", "run folder", "versions"][: 3 if THOROUGH else 1])
def test_a_rank_that_dies_on_the_way_is_named_and_holds_nobody(where, by_hand, tmp_path, digits):
    flags = ["--data", digits, "--run-dir", tmp_path / "runs", "--timeout", 3]
    first, second = patched(by_hand, tmp_path, LOST.replace("WHERE", where), *flags)
    assert (first.status, second.status) == (1, 9)
    table = red if where in TOGETHER else without
    said = first.out[first.out.index("check  ") :]  # torch may warn before
    assert table(said)["ranks"][0].startswith("rank 1 of 2 ")
    assert [path.name for path in tmp_path.iterdir()] == ["patched.py"]


# ---- what cannot be read


@pytest.mark.parametrize("words", [["--nix"], ["more"], ["--num-workers", "two"], ["--data"]])
def test_a_wrong_flag_stops_with_the_usage_and_one_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    said = capsys.readouterr()
    usage, line = said.err.splitlines()
    assert (end.value.code, said.out) == (2, "") and "--help" in usage and words[0] in line


def test_a_number_of_slurm_that_is_none_is_red(by_hand, script, digits, tmp_path):
    (done,) = by_hand(script, {0: ["--data", digits, "--run-dir", tmp_path]}, 1, SLURM_CPUS_PER_TASK="two")
    red_rows = red(done.out)
    assert list(red_rows) == ["cpus"] and re.match(r"rank 0: .*'two'", red_rows["cpus"][0])


# ---- single rows, of ranks that share a store and differ in what they are told


A, B, BOTH = {"gpus": "A"}, {"gpus": "B"}, {"gpus": "AB"}
GIVEN = {"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}
TORCHRUN = {"env": {"TORCHELASTIC_RUN_ID": "1"}}
OLD_DRIVER = {"trouble": RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease")}
ONE, TWO = {"host": "one", "local_rank": 0}, {"host": "two", "local_rank": 0}
SHARED = {"cpus": 2, "first": 0}
DOCKER = 64 * 2**20
SALLOC = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}
# check, ranks, what the row must say; first what is right, then what is wrong with it.
RIGHT = {
    "two ranks": ("ranks", [{}, {}], "2 ranks on 1 host, started by env"),
    "two hosts": ("ranks", [ONE, TWO], "2 ranks on 2 hosts"),
    "one task": ("ranks", [{"launcher": "slurm", "env": {"SLURM_NTASKS": "1"}}], "1 rank on 1 host, started by slurm"),
    "a GPU each": ("devices", [BOTH, BOTH], "cuda:0; cuda:1"),
    "a hidden GPU each": ("devices", [A, B], "cuda:0"),  # each task is shown one GPU, its cuda:0
    "one number on two hosts": ("devices", [A | ONE, A | TWO], "cuda:0"),
    "no GPU": ("devices", [{}, {}], "cpu"),
    "one version": ("versions", [{}, {}], f"torch {torch.__version__}, torchvision 1"),
    "a CPU each": ("cpus", [{}, {}], "each rank's own: 1"),
    "two CPUs for two": ("cpus", [SHARED, SHARED], "each rank's own: 1"),
    "two nodes on one machine": (
        "cpus",
        [SHARED | {"workers": 1}, SHARED | {"workers": 1, "env": {"SLURM_NODEID": "1", "OMP_NUM_THREADS": "2"}}],
        "each rank's own: 2",
    ),
    "three CPUs for three": ("cpus", [{"cpus": 3, "first": 0}] * 3, "each rank's own: 1"),
    "tasks on one machine": ("cpus", [SHARED | {"launcher": "slurm"}] * 4, "each rank's own: 1"),
    "a network": ("network", [ONE | {"address": "10.0.0.1"}, TWO | {"address": "fe80::1"}], "one is 10.0.0.1; two is"),
    "one dataset": ("data", [{}, {}], "MNIST 0, whole on each rank"),
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
    "one GPU for two": ("devices", [A, A], "all ranks: GPU A on here is shared", "of MIG: one slice, one rank"),
    "two of three": ("devices", [A, B, B], "ranks 1, 2: GPU B on here is shared", "a GPU for each task"),
    "a GPU for one": ("devices", [A, {}], "rank 1: no GPU, where others have one", "--no-cuda"),
    "too few GPUs": ("devices", [BOTH] * 3, "rank 2: local rank 2 has no GPU (2 here)", "a GPU for each task"),
    "one GPU under torchrun": ("devices", [A | TORCHRUN] * 2, "rank 1: local rank 1 has no GPU (1 here)", "--no-cuda"),
    "a torch without": (
        "devices",
        [GIVEN],
        f"rank 0: GPU 0,1 is given, but torch {torch.__version__} sees none",
        "a torch built for it",
    ),
    "too old a driver": ("devices", [A | OLD_DRIVER], "rank 0: the CPU is used, and not the GPU: The NVIDIA", "torch"),
    "too old a driver for what was given": (
        "devices",
        [A | OLD_DRIVER | GIVEN] * 2,
        "all ranks: GPU 0,1 is given, but The NVIDIA driver on your system is too old (found version 12020).",
        "--no-cuda",
    ),
    "two versions": ("versions", [{}, {"version": "2"}], "rank 1: python", "one environment"),
    "one CPU for two": ("cpus", [{}, {"first": 0}], "all ranks: CPUs of its own: 0", "fewer ranks on a node"),
    "a worker too many": ("cpus", [{"workers": 1}] * 2, "all ranks: CPUs of its own: 1", "fewer --num-workers"),
    "not inherited": (
        "cpus",
        [{"env": {"SLURM_CPUS_PER_TASK": "4"}}],
        "rank 0: CPUs: 1, but --cpus-per-task=4",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"',
    ),
    "too many threads": (
        "cpus",
        [{"env": {"OMP_NUM_THREADS": "4"}}],
        "rank 0: CPUs of its own: 1, for itself with --num-workers 0, and OMP_NUM_THREADS=4",
        "a smaller OMP_NUM_THREADS",
    ),
    "a machine that does not know itself": (
        "network",
        [{}, {}],
        "all ranks: here, this machine's name, has no address: torchrun waits minutes for it",
        "/etc/hosts; or torchrun --standalone --local-addr=localhost",
    ),
    "other digits": (
        "data",
        [{}, {"data": "digits"}],
        "rank 1: digits 0, whole on each rank, where rank 0 has MNIST 0",
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


def test_a_line_with_which_a_call_stops_is_kept_and_ends_nothing(capsys):
    def fails():
        raise CheckFailed("seen")

    assert capture(lambda: stop("the line")) == (None, "the line") and capsys.readouterr().err == ""
    assert capture(lambda: sys.exit("the line")) == (None, "the line")
    assert capture(lambda: 1 / 0) == (None, "division by zero") and capture(lambda: 3) == (3, "")
    assert capture(fails) == (None, "seen") and capture(lambda: next(iter(()))) == (None, "StopIteration()")


def folder_of(folder, rank=0, **plan):
    """What the row of the run folder says of a rank, given rank 0's plan, or made as rank 0 makes it."""
    case = Case("single", rank, rank, 1, Namespace(run_dir=folder))
    case.plan = plan or checks.make_plan(case, {0: {"devices": (["", "cpu"], "")}})
    seen, trouble = capture(lambda: checks.find_folder(case))
    Path(case.plan["file"] or "nowhere").unlink(missing_ok=True)
    return seen, trouble


def test_a_file_where_a_folder_should_be_is_said_and_nothing_is_left(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        _, trouble = folder_of(folder)
        assert str(folder) in trouble and "Not a directory" in trouble
    new = tmp_path / "new" / "runs"
    seen, trouble = folder_of(new)
    assert str(new) in seen and trouble == "" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_each_node_has_for_itself_is_red(tmp_path):
    _, trouble = folder_of(tmp_path, 1, file=str(tmp_path / ".doctor-elsewhere"), trouble="")
    assert str(tmp_path) in trouble and "rank 0" in trouble
