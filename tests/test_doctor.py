"""The doctor: green under every launcher, and red, with a cure, for each part that is taken away."""

import os
import re
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import pytest
import torch
from doctors import red, rows_of, seen_by
from faults.ranks import Ranks
from real import LIMIT, THOROUGH, python, weekly
from refusals import ended, refused

from ddp_helpers.__main__ import main
from ddp_helpers.launch import launch, scripts
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.rank.device import runs_on
from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture_trouble
from ddp_helpers.rank.doctor.checks import CHECKS, TOGETHER
from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.scripts.doctor import print_table


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


@weekly  # under srun it is green in test_docs, in a job
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
    (tmp_path / "two").mkdir()
    flags = {0: ["--data", digits, "--run-dir", tmp_path / "one"]}
    flags[1] = ["--data", data, "--run-dir", tmp_path / "two", "--num-workers", 999]
    first, second = by_hand(script, flags, 2)
    assert (first.status, second.status, second.out) == (1, 1, "")
    red_rows = red(first.out)
    assert list(red_rows) == ["cpus", "run folder", "data"]
    seen, cure = red_rows["cpus"]
    assert seen.startswith("rank 1: ") and "--num-workers 999" in seen and "more --cpus-per-task" in cure
    seen, cure = red_rows["run folder"]
    assert seen.startswith("rank 1: ") and str(tmp_path / "two") in seen and "--run-dir" in cure
    seen, cure = red_rows["data"]
    assert seen.startswith("rank 1: ") and "t10k-labels-idx1-ubyte" in cure
    assert "download_data.py --data" in cure
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.py", "two"]
    assert not list((tmp_path / "two").iterdir())


def test_damaged_data_and_a_folder_that_cannot_be_written_are_red(by_hand, script, tmp_path, digits):
    data = shutil.copytree(digits, tmp_path / "data")
    images = data / "MNIST" / "raw" / "train-images-idx3-ubyte"
    flipped = bytearray(images.read_bytes())
    flipped[-1] ^= 1
    images.write_bytes(flipped)
    (done,) = by_hand(script, {0: ["--data", data, "--run-dir", tmp_path / ("x" * 300)]}, 1)
    red_rows = red(done.out)
    assert done.status == 1 and list(red_rows) == ["run folder", "data", "space"]
    seen, cure = red_rows["run folder"]
    assert "File name too long" in seen and "--run-dir" in cure
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.py"]
    assert str(images) in red_rows["data"][1]


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
    assert red_rows["data"][0].startswith("rank 1: ") and str(tmp_path) in red_rows["data"][1]
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


@pytest.mark.parametrize("env", [{"MASTER_ADDR": ""}, {"MASTER_PORT": "65536"}])
def test_a_meeting_point_that_nobody_exported_is_red(by_hand, script, digits, tmp_path, env):
    (done,) = by_hand(script, {0: ["--data", digits, "--run-dir", tmp_path]}, 2, **env)
    red_rows = without(done.out)
    assert done.status == 1 and list(red_rows) == ["ranks"]
    assert "export" in red_rows["ranks"][1] and all(name in " ".join(red_rows["ranks"]) for name in env)


def test_an_interface_that_is_not_there_is_red_and_so_is_the_sum(by_hand, script, digits, tmp_path):
    flags = ["--data", digits, "--run-dir", tmp_path]
    first, second = by_hand(script, {0: flags, 1: flags}, 2, GLOO_SOCKET_IFNAME="nowhere0")
    red_rows = red(first.out)
    assert (first.status, second.status) == (1, 1) and list(red_rows) == ["network", "all-reduce"]
    assert red_rows["network"][0].startswith("all ranks: GLOO_SOCKET_IFNAME=nowhere0")
    assert "export GLOO_SOCKET_IFNAME=" in red_rows["network"][1] and red_rows["all-reduce"][1]


PATCHED = """
import os, sys, time, torch
from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.scripts import doctor
if os.environ["RANK"] == "1":
    right, full = time.time, torch.full
    checks.time.time = lambda: right() + 5000
    checks.torch.full = lambda size, value, **more: full(size, 7.0, **more)
    checks.torchvision.__version__ = "0.0"
doctor.main()
"""
LOST = """
import os, sys
from ddp_helpers.rank.scripts import doctor
dies = lambda case: os._exit(9) if case.rank else right(case)
right, cure = doctor.CHECKS["WHERE"]
doctor.CHECKS["WHERE"] = dies, cure
doctor.main()
"""


def patched(by_hand, tmp_path, code, *flags):
    """Two ranks of a doctor that was tampered with, and how each ended."""
    (tmp_path / "patched.py").write_text(code)
    return by_hand(tmp_path / "patched.py", dict.fromkeys(range(2), flags), 2)


def test_a_wrong_sum_a_wrong_clock_and_another_version_are_red(by_hand, tmp_path, digits):
    # The negative control of what is green in every other test.
    first, second = patched(by_hand, tmp_path, PATCHED, "--data", digits, "--run-dir", tmp_path)
    red_rows = red(first.out)
    assert (first.status, second.status) == (1, 1) and list(red_rows) == ["versions", "clocks", "all-reduce"]
    seen, cure = red_rows["versions"]
    assert seen.startswith("rank 1: python ") and seen.endswith(", torchvision 0.0") and "rank 0 has python " in cure
    assert re.fullmatch(r"all ranks: .*\b2 ranks\b.*\b8\b.*\b3", red_rows["all-reduce"][0])  # 1 + 7, and not 1 + 2
    assert re.fullmatch(r"rank 1: (4[89]|50)\d\d\.\d s ahead of rank 0", red_rows["clocks"][0])


@pytest.mark.parametrize("where", ["all-reduce", "space", "clocks", "run folder"][: 4 if THOROUGH else 1])
def test_a_rank_that_dies_on_the_way_is_named_and_holds_nobody(where, by_hand, tmp_path, digits):
    flags = ["--data", digits, "--run-dir", tmp_path / "runs", "--timeout", 10]
    first, second = patched(by_hand, tmp_path, LOST.replace("WHERE", where), *flags)
    assert (first.status, second.status) == (1, 9)
    assert red(first.out)["ranks"][0].startswith("rank 1 of 2 ")
    assert not (tmp_path / "runs").exists()


# ---- what cannot be read


@pytest.mark.parametrize(
    "words", [["--nix"], ["more"], ["--timeout", "0"], ["--num-workers", "-1"], ["--num-workers", "two"], ["--data"]]
)
def test_a_wrong_flag_stops_with_one_line(words):
    refused(main, ["doctor", *words], named=[words[0], "--help"])


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "2", "RANK": "none"},
        {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_a_wrong_variable_stops_with_one_line(env, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    refused(main, ["doctor"], named=[list(env)[-1]])


def test_a_number_of_slurm_that_is_none_is_red(by_hand, script, digits, tmp_path):
    (done,) = by_hand(script, {0: ["--data", digits, "--run-dir", tmp_path]}, 1, SLURM_CPUS_PER_TASK="two")
    red_rows = red(done.out)
    assert list(red_rows) == ["cpus"] and re.match(r"rank 0: SLURM_CPUS_PER_TASK\b.*'two'", red_rows["cpus"][0])


# ---- single rows, of ranks that share a store and differ in what they are told


A, B = {"gpus": [("A", 8, 0)]}, {"gpus": [("B", 8, 0)]}
BOTH = {"gpus": [("A", 8, 9), ("B", 8, 9)]}  # an sm_89, which runs what was built for sm_86
ONE, TWO = {"host": "one", "local_rank": 0}, {"host": "two", "local_rank": 0}
SHARED = {"cpus": 2, "first": 0}
DOCKER = 64 * 2**20
SALLOC = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}
# check, ranks, what the row must say; first what is right, then what is wrong with it.
RIGHT = {
    "two ranks": ("ranks", [{}, {}], "2 ranks on 1 host, started by torchrun"),
    "two hosts": ("ranks", [ONE, TWO], "2 ranks on 2 hosts"),
    "two pretended nodes": ("ranks", [{}, {"local_rank": 0, "env": {"SLURM_NODEID": "1"}}], "on 1 host"),
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
    "loopback on one host": ("network", [{"address": "127.0.1.1"}] * 2, "gloo listens on 127.0.1.1 (here)"),
    "a network": ("network", [ONE | {"address": "10.0.0.1"}, TWO | {"address": "fe80::1"}], "10.0.0.1 (one); "),
    "an interface": ("network", [x | {"env": {"GLOO_SOCKET_IFNAME": "eth0"}} for x in (ONE, TWO)], "eth0"),
    "one dataset": ("data", [{}, {}], "MNIST, whole on each rank"),
    "space": ("space", [{}, {"free": 10**9}], "1100 GB free for the run folder; 1 GB"),
    "Docker's default, and nobody needs it": ("/dev/shm", [{"free": DOCKER}], "64 MB free"),
    "one rank with a GPU": ("/dev/shm", [A | {"free": DOCKER}], "64 MB free"),
    "more than Docker's default": ("/dev/shm", [A | {"free": DOCKER + 1}, B | {"free": DOCKER + 1, "workers": 9}], ""),
}
WRONG = {  # check, ranks, the beginning of what was seen, a part of the cure
    "a local rank twice": ("ranks", [{}, {"local_rank": 0}], "all ranks: local rank 0 on here", "one launcher"),
    "two launchers": ("ranks", [{}, {"launcher": "env"}], "rank 1: 2 ranks on 1 host, started by env", "one launcher"),
    "srun forgotten": (
        "ranks",
        [{"launcher": "single", "env": {"SLURM_NTASKS": "4"}}],
        "rank 0: alone, but the job has SLURM_NTASKS=4",
        "srun",
    ),
    "srun forgotten in a shell of salloc": ("ranks", [{"launcher": "slurm", "env": SALLOC}], "rank 0: alone", "srun"),
    "one GPU for two": ("devices", [A, A], "all ranks: GPU A on here is shared", "as many GPUs as tasks"),
    "two of three": ("devices", [A, B, B], "ranks 1, 2: GPU B on here is shared", "as many GPUs"),
    "a GPU for one": ("devices", [A, {}], "rank 1: no GPU, where others have one", "--no-cuda"),
    "too few GPUs": (
        "devices",
        [BOTH, BOTH, BOTH],
        "rank 2: local rank 2 has no GPU (2 here)",
        "as many GPUs as tasks",
    ),
    "a torch without": (
        "devices",
        [{"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}],
        f"rank 0: CUDA_VISIBLE_DEVICES=0,1, but torch {torch.__version__} sees no GPU",
        "a torch built for them",
    ),
    "too old for this torch": (
        "devices",
        [{"gpus": [("A", 7, 0)]}],
        "rank 0: V100 is sm_70, and this torch is built for sm_75 sm_80 sm_86 sm_90",
        "a torch built for them",
    ),
    "too old a driver": (
        "devices",
        [A | {"trouble": RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please")}],
        f"rank 0: there are 1 GPU(s), and torch {torch.__version__} can use none (The NVIDIA driver",
        "a torch built for them",
    ),
    "two versions": ("versions", [{}, {"version": "2"}], "rank 1: python", "torchvision 1"),
    "one CPU for two": ("cpus", [{}, {"first": 0}], "all ranks: CPUs of its own: 0", "fewer ranks on a node"),
    "a worker too many": ("cpus", [{"workers": 1}] * 2, "all ranks: CPUs of its own: 1", "--num-workers 0"),
    "not inherited": (
        "cpus",
        [{"env": {"SLURM_CPUS_PER_TASK": "4"}}],
        "rank 0: CPUs: 1, but --cpus-per-task=4",
        "srun --cpus-per-task=",
    ),
    "a small machine": (
        "cpus",
        [{"env": {"SLURM_CPUS_PER_TASK": "9"}}],
        "rank 0: CPUs: 1",
        "at most --cpus-per-task=8",
    ),
    "too many threads": (
        "cpus",
        [{"env": {"OMP_NUM_THREADS": "4"}}],
        "rank 0: CPUs of its own: 1, for OMP_NUM_THREADS=4",
        "OMP_NUM_THREADS=1",
    ),
    "loopback": (
        "network",
        [ONE | {"address": "127.0.1.1"}, TWO | {"address": "::1"}],
        "rank 0: gloo listens on 127.0.1.1 (one), which does not leave one; rank 1: gloo listens on ::1 (two), which",
        "export GLOO_SOCKET_IFNAME=",
    ),
    "a machine that does not know itself": (
        "network",
        [{}, {}],
        "all ranks: here, this machine's name, has no address: torchrun waits minutes for it",
        "127.0.1.1 here as a line of /etc/hosts; or torchrun --standalone --local-addr=localhost",
    ),
    "a name without an address": (
        "network",
        [ONE, TWO | {"address": "10.0.0.2"}],
        "rank 0: gloo listens on 127.0",
        "=",
    ),
    "lo": (
        "network",
        [x | {"env": {"GLOO_SOCKET_IFNAME": "lo"}} for x in (ONE, TWO)],
        "rank 0: gloo listens on lo",
        "",
    ),
    "other digits": ("data", [{}, {"data": "digits"}], "rank 1: digits, where rank 0 has MNIST", "one --data"),
    "no data on rank 0": ("data", [{"data": ""}, {}], "rank 0: no whole data", "Get it."),
    "no space": ("space", [{}, {"free": 10**9 - 10**7}], "rank 1: 0.99 GB free for runs", "make room"),
    "no shared memory": (
        "/dev/shm",
        [{"free": 2**25, "workers": 2}],
        "rank 0: 32 MB for --num-workers 2",
        "--shm-size",
    ),
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


@pytest.mark.parametrize(
    ("its", "built", "fine"),
    [
        ((7, 0), ["sm_75", "sm_80", "compute_120"], False),
        ((7, 5), ["sm_75"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 1), ["sm_100", "sm_120"], True),
        ((13, 0), ["sm_120"], False),
        ((13, 0), ["sm_90", "compute_120"], True),
        ((9, 0), ["gfx942"], True),
    ],
)
def test_a_torch_runs_on_what_it_was_built_for(its, built, fine):
    assert runs_on(its, built) is fine


def test_a_table_says_nothing_that_a_terminal_obeys(capsys):
    assert (
        print_table([("one", "ü µ", ""), ("two", "a\x1b[2J\nb", "do\x07 it")]) == 1
        and print_table([("one", "", "")]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "one         ok  ü µ",
        "two         RED a [2J b",
        f"{'':<15} cure: do  it",
        "1 of 2 checks RED",
    ]


def test_a_line_with_which_a_call_stops_is_kept_and_ends_nothing(capsys):
    def fails():
        raise CheckFailed("seen", "cure")

    assert capture_trouble(lambda: stop("the line")) == (None, ["the line"]) and capsys.readouterr().err == ""
    assert capture_trouble(lambda: 1 / 0) == (None, ["division by zero"]) and capture_trouble(lambda: 3) == (3, [])
    assert capture_trouble(fails) == (None, ["seen", "cure"])


def lone(folder):
    """A job of one rank with this run folder."""
    return Case("single", 0, 0, 1, Namespace(run_dir=folder, timeout=1))


def test_a_file_where_a_folder_should_be_is_said_and_nothing_is_left(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        _, (seen,) = capture_trouble(lambda folder=folder: checks.check_folder(lone(folder)))
        assert str(folder) in seen and "Not a directory" in seen
    assert str(tmp_path / "new" / "runs") in checks.check_folder(lone(tmp_path / "new" / "runs"))
    lost = replace(lone(tmp_path / "new"), size=2)
    _, (seen,) = capture_trouble(lambda: checks.check_folder(lost))
    assert re.fullmatch(r"rank 1 of 2 \w+ after 1 s", seen)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_each_node_has_for_itself_is_red(tmp_path):
    first = replace(lone(tmp_path), size=2)
    first.first("folder", str(tmp_path))
    first.first("file", str(tmp_path / ".doctor-elsewhere"))
    first.store.set("file of 0", "")
    second = replace(first, rank=1)
    _, (seen,) = capture_trouble(lambda: checks.check_folder(second))
    assert str(tmp_path) in seen and "rank 0" in seen
