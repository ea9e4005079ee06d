"""The doctor: green under every launcher, and red, with a cure, for each part that is taken away."""

import io
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from real import IMPORT, gated, python

from ddp_helpers.__main__ import main
from ddp_helpers.notebook import launch, scripts, slurm
from ddp_helpers.notebook.environment import clean
from ddp_helpers.rank.doctor import examine as doctor
from ddp_helpers.rank.doctor.checks import check_cpus, check_devices, check_ranks, check_versions
from ddp_helpers.rank.doctor.examine import EACH, FILES, TOGETHER, examine, plain, table
from ddp_helpers.rank.doctor.exchange import sees, share_file, write_nonce
from ddp_helpers.rank.doctor.facts import Facts, Row
from ddp_helpers.rank.doctor.probes import free, overhear
from ddp_helpers.rank.doctor.shared_checks import (
    check_clocks,
    check_dataset,
    check_folder,
    check_network,
    check_reduce,
    check_shm,
    check_space,
)
from ddp_helpers.rank.topology import stop

CHECKS = ["ranks", "versions", "devices", "cpus", "network", "all-reduce", "clocks", "run folder", "data", "space"]
CHECKS += ["/dev/shm"]
GREEN = f"all {len(CHECKS)} checks green"


def rows_of(lines):
    """A printed table as {check: (state, what was seen, cure)}, and its last line. The order and the number count."""
    header, *lines, last = lines
    assert header.split() == ["check", "what", "was", "seen"]
    rows = {}
    for line in lines:
        name, state, seen = line[:11].strip(), line[12:15].strip(), line[16:]
        if name:
            assert state in ("ok", "RED") and name not in rows and seen
            rows[name] = (state, seen, "")
        else:
            name = list(rows)[-1]
            assert rows[name][0] == "RED" and seen.startswith("cure: ")
            rows[name] = (*rows[name][:2], seen.removeprefix("cure: "))
    assert all(bool(cure) == (state == "RED") for state, _, cure in rows.values())
    return rows, last


def red(text):
    """The red rows of a whole table, all checks of which are there."""
    rows, last = rows_of(text.splitlines())
    assert list(rows) == CHECKS
    found = {name: row[1:] for name, row in rows.items() if row[0] == "RED"}
    assert last == (f"{len(found)} of {len(rows)} checks RED" if found else GREEN)
    return found


@pytest.fixture
def script(tmp_path):
    return scripts.write("doctor", tmp_path / "doctor.py")


def by_hand(script, ranks, size, limit=60, cwd=None, **env):
    """Start these ranks, {rank: its flags}, where ddp_helpers is not installed, and wait for their ends."""
    port = {"MASTER_PORT": launch.free_port()} | env
    with gated() as processes:
        for rank, flags in ranks.items():
            ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            processes.start(script, *flags, standalone=True, cwd=cwd, **(ids | port))
        return processes.go(limit)


# ---- green


def test_it_is_green_alone_and_leaves_nothing(tmp_path, digits):
    done = python("-m", "ddp_helpers", "doctor", cwd=tmp_path, env={**os.environ, "DDP_MNIST_ROOT": str(digits)})
    assert done.returncode == 0 and red(done.stdout) == {} and not done.stderr
    assert "1 rank on 1 host, started by no launcher" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nor the folder for runs


def test_it_is_green_under_torchrun_started_from_a_notebook(script, tmp_path, digits):
    done = launch.run(script, "--data", digits, "--run-dir", tmp_path / "a" / "b", ranks=2, timeout=IMPORT)
    said = done.of(0)
    assert red("\n".join(said)) == {} and done.of(1) == []  # once, by rank 0
    rows, _ = rows_of(said)
    assert "2 ranks on 1 host, started by torchrun" in rows["ranks"][1]
    assert f"torch {torch.__version__}" in rows["versions"][1]
    assert "µs for 4 bytes" in rows["all-reduce"][1] and "GB/s for 16 MB (busbw: " in rows["all-reduce"][1]
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.py"]


def test_it_is_green_under_mpirun(mpirun, tmp_path, digits):
    words = ["-m", "ddp_helpers", "doctor", "--data", digits, "--run-dir", tmp_path]
    done = launch.run(*words, ranks=2, launcher="mpirun", timeout=IMPORT)
    assert red("\n".join(done.of(0))) == {} and "started by openmpi" in done.of(0)[1]


def test_it_is_green_under_srun_on_two_nodes(cluster, tmp_path, digits):
    words = ["-m", "ddp_helpers", "doctor", "--data", digits, "--run-dir", tmp_path, "--timeout", 60]
    done = launch.run(*words, ranks=(1, 1), launcher="srun", timeout=IMPORT, env={"MASTER_ADDR": "127.0.0.1"})
    assert red("\n".join(done.of(0))) == {} and "started by slurm" in done.of(0)[1]


def test_it_is_green_as_a_job(cluster, tmp_path, digits):
    folder = tmp_path / "job"
    program = ("doctor.py", "--data", str(digits), "--run-dir", "{run_dir}", "--timeout", "60")
    slurm.write(slurm.Job("doctor", program, nodes=2, time="5"), slurm.Site.load("local"), folder)
    scripts.write("doctor", folder / "doctor.py")
    slurm.submit(folder)
    slurm.watch(folder)
    [run] = slurm.collect(folder)
    assert run.job["state"] == "COMPLETED"
    assert red("\n".join(slurm.said(folder, 0))) == {} and not [
        path for path in folder.iterdir() if path.name[0] == "."
    ]


# ---- red, with the cure


def test_a_cpu_that_srun_did_not_hand_on_is_red(cluster, tmp_path, digits):
    # Slurm 22.05 and 23.02 leave a task one CPU where the job asked for more.
    command = ["srun", "--nodes=1", "--cpus-per-task=2", "taskset", "-c", "0", sys.executable, "-m", "ddp_helpers"]
    command += ["doctor", "--data", str(digits), "--run-dir", str(tmp_path)]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=IMPORT, check=False)
    found = red(done.stdout)
    assert done.returncode == 1 and list(found) == ["cpus"]
    assert found["cpus"] == ("rank 0: 1 CPU, but --cpus-per-task=2", 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"')


def test_what_is_wrong_with_rank_1_only_is_in_rank_0s_table(script, tmp_path, digits):
    data = shutil.copytree(digits, tmp_path / "data")
    (data / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    flags = {0: ["--data", digits, "--run-dir", tmp_path / "one"]}
    flags[1] = ["--data", data, "--run-dir", tmp_path / "two", "--num-workers", 999]
    first, second = by_hand(script, flags, 2)
    assert (first.status, second.status, second.out) == (1, 1, "")
    found = red(first.out)
    assert list(found) == ["cpus", "run folder", "data"]
    seen, cure = found["cpus"]
    assert seen.startswith("rank 1: ") and "--num-workers 999" in seen and "more --cpus-per-task" in cure
    seen, cure = found["run folder"]
    assert seen == f"rank 1: not in {tmp_path / 'two'}: the file that rank 0 wrote" and "all nodes share" in cure
    seen, cure = found["data"]
    assert seen == "rank 1: no whole data" and "t10k-labels-idx1-ubyte is missing" in cure
    assert "download_data.py --data" in cure
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.py"]


def test_damaged_data_and_a_folder_that_cannot_be_written_are_red(script, tmp_path, digits):
    data = shutil.copytree(digits, tmp_path / "data")
    images = data / "MNIST" / "raw" / "train-images-idx3-ubyte"
    flipped = bytearray(images.read_bytes())
    flipped[-1] ^= 1
    images.write_bytes(flipped)
    (done,) = by_hand(script, {0: ["--data", data, "--run-dir", tmp_path / "new" / ("x" * 300)]}, 1)
    found = red(done.out)
    assert done.status == 1 and list(found) == ["run folder", "data"]
    assert "cannot be written (File name too long)" in found["run folder"][0] and "may write" in found["run folder"][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.py"]
    assert f"{images} is cut short or damaged" in found["data"][1] and "get it again" in found["data"][1]


def alone(text):
    """The red rows of the table that rank 0 prints by itself."""
    rows, last = rows_of(text.splitlines())
    found = {name: row[1:] for name, row in rows.items() if row[0] == "RED"}
    assert next(iter(rows)) == "ranks" and last == f"{len(found)} of {len(rows)} checks RED"
    assert len(rows) == 1 + len(EACH) + len(FILES)
    return found


def test_a_missing_rank_is_red(script, digits, tmp_path):
    flags = ["--data", digits, "--run-dir", tmp_path, "--timeout", 3]
    first, second = by_hand(script, {0: flags, 1: flags}, 3)
    found = alone(first.out)
    assert list(found) == ["ranks"] and "rank 2 of 3 missing after 3 s" in found["ranks"][0]
    assert "start all ranks" in found["ranks"][1]
    assert (first.status, first.err, second.status, second.out) == (1, "", 1, "")
    assert "rank 2 of 3 missing" in second.line
    assert first.seconds < 20 and first.seconds < second.seconds < 25  # a launcher ends all when the first one fails


def test_a_missing_rank_0_is_one_line(script, digits):
    (done,) = by_hand(script, {1: ["--data", digits, "--timeout", 2]}, 2)
    assert (done.status, done.out) == (2, "") and "rank 0 is not there after 2 s" in done.line


def test_a_port_that_is_taken_is_red(script, digits, tmp_path):
    with closing(socket.create_server(("", 0))) as stranger:
        port = stranger.getsockname()[1]
        (done,) = by_hand(script, {0: ["--data", digits, "--run-dir", tmp_path]}, 2, MASTER_PORT=port)
    found = alone(done.out)
    assert done.status == 1 and list(found) == ["ranks"] and done.seconds < 20
    assert f"MASTER_PORT={port}: rank 0 cannot listen" in found["ranks"][0]
    assert "export MASTER_PORT=" in found["ranks"][1]


def test_an_interface_that_is_not_there_is_red(script, digits, tmp_path):
    flags = {0: ["--data", digits, "--run-dir", tmp_path]}
    (done,) = by_hand(script, flags, 1, GLOO_SOCKET_IFNAME="nowhere0")
    found = alone(done.out)
    assert done.status == 1 and list(found) == ["ranks", "network"]
    assert "GLOO_SOCKET_IFNAME=nowhere0, but nowhere0 is not among " in found["network"][0]
    assert "export GLOO_SOCKET_IFNAME=" in found["network"][1]


PATCHED = """
import os, sys
from ddp_helpers.rank.doctor import examine as doctor, exchange, probes
if os.environ["RANK"] == "1":
    right = exchange.now
    exchange.contribution = lambda rank: 7.0
    exchange.now = lambda: right() + 5
    probes.torchvision.__version__ = "0.0"
sys.exit(doctor.examine())
"""
LOST = """
import os, sys
from ddp_helpers.rank.doctor import examine as doctor
doctor.compare_clocks = lambda facts: os._exit(9) if facts.rank else None
sys.exit(doctor.examine())
"""


def patched(tmp_path, code, *flags):
    """Two ranks of a doctor that was tampered with, and how each ended."""
    path = tmp_path / "patched.py"
    path.write_text(code)
    ids = {"WORLD_SIZE": 2, "MASTER_PORT": launch.free_port()}
    with gated() as processes:
        for rank in range(2):
            processes.start(path, *flags, RANK=rank, LOCAL_RANK=rank, **ids)
        return processes.go(60)


def test_a_wrong_sum_a_wrong_clock_and_another_version_are_red(tmp_path, digits):
    # The negative control of what is green in every other test.
    first, second = patched(tmp_path, PATCHED, "--data", digits, "--run-dir", tmp_path)
    found = red(first.out)
    assert (first.status, second.status) == (1, 1) and list(found) == ["versions", "all-reduce", "clocks"]
    assert found["versions"][0] == "rank 1: torchvision 0.0"
    assert found["all-reduce"][0] == "all ranks: the sum of 2 ranks is 8, not 3"
    assert found["clocks"][0] == "rank 1: 5.0 s ahead of rank 0"


def test_a_rank_that_dies_on_the_way_is_named_and_holds_nobody(tmp_path, digits):
    first, second = patched(tmp_path, LOST, "--data", digits, "--run-dir", tmp_path / "runs", "--timeout", 5)
    assert (first.status, second.status) == (1, 9) and first.seconds < 30
    assert "rank 1 of 2" in first.out + first.err
    assert not (tmp_path / "runs").exists()


# ---- what cannot be read


@pytest.mark.parametrize(
    "words", [["--nix"], ["more"], ["--timeout", "0"], ["--num-workers", "-1"], ["--num-workers", "two"], ["--data"]]
)
def test_a_wrong_flag_stops_with_one_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1) and words[0] in err and "--help" in err


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "2", "RANK": "none"},
        {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_CPUS_PER_TASK": "two"},
    ],
)
def test_a_wrong_variable_stops_with_one_line(env, capsys, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        examine([])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1) and list(env)[-1] in err


# ---- single rows, from made-up facts


def ranks(*changes, **common):
    """Facts of as many ranks as there are changes; each has a CPU and a local rank of its own on one host."""
    same = Facts(world_size=len(changes), launcher="torchrun", host="here", machine=8, data="MNIST", **common)
    return [replace(same, **({"rank": i, "local_rank": i, "cpus": [i]} | change)) for i, change in enumerate(changes)]


GPUS = ({"gpu": "A", "device": "cuda:0"}, {"gpu": "B", "device": "cuda:1"})
TWO_HOSTS = ({"host": "one", "local_rank": 0}, {"host": "two", "local_rank": 0})
SHARED = {"cpus": [0, 1]}
# check, ranks, what the row must say; first what is right, then what is wrong with it.
RIGHT = {
    "two ranks": (check_ranks, ranks({}, {}), "2 ranks on 1 host"),
    "two hosts": (check_ranks, ranks(*TWO_HOSTS), "2 ranks on 2 hosts"),
    "two pretended nodes": (check_ranks, ranks({}, {"local_rank": 0, "node": 1}), "on 1 host"),
    "a GPU each": (check_devices, ranks(*GPUS), "cuda:0, cuda:1"),
    # Each task is shown one GPU, its cuda:0.
    "a hidden GPU each": (check_devices, ranks(GPUS[0], GPUS[1] | {"device": "cuda:0"}), "cuda:0"),
    "one number on two hosts": (check_devices, ranks({"gpu": "A"} | TWO_HOSTS[0], {"gpu": "A"} | TWO_HOSTS[1]), ""),
    "one version": (check_versions, ranks({}, {}, versions={"torch": "2.15"}), "torch 2.15"),
    "a CPU each": (check_cpus, ranks({}, {}), "1 CPU"),
    "two CPUs for two": (check_cpus, ranks(SHARED, SHARED), "1 CPU"),
    "two nodes on one machine": (check_cpus, ranks(SHARED, SHARED | {"node": 1}, threads=2, workers=1), "2 CPUs"),
    "tasks on one machine": (check_cpus, ranks(*[SHARED | {"launcher": "slurm"}] * 4), "1 CPU"),
    "loopback on one host": (check_network, ranks({}, {}, loopback=True, interface="lo"), "lo"),
    "a network": (check_network, ranks(*TWO_HOSTS, interface="eth0"), "eth0"),
    "a sum": (check_reduce, ranks({}, {"latency": 2e-6}, bandwidth=3e9), "2 µs for 4 bytes; 3.00 GB/s"),
    "a small skew": (check_clocks, ranks({}, {"skew": -0.25}), "250.000 ms"),
    "a folder": (check_folder, ranks({}, {}), "runs"),
    "one dataset": (check_dataset, ranks({}, {}), "MNIST"),
    "space": (check_space, ranks({}, {"free": 10**9}), "1 GB"),
    "no workers": (check_shm, ranks({"shm": 2**20}), "1 MB"),
}
WRONG = {  # check, ranks, the beginning of what was seen, a part of the cure
    "a rank twice": (check_ranks, ranks({}, {"rank": 0}), "of 2 there are 0, 0", "number all ranks"),
    "a local rank twice": (
        check_ranks,
        ranks({}, {"local_rank": 0}),
        "all ranks: local rank 0 on here",
        "one launcher",
    ),
    "two launchers": (check_ranks, ranks({}, {"launcher": "env"}), "rank 1: env says 2 ranks", "one launcher"),
    "srun forgotten": (check_ranks, ranks({"tasks": 4}), "rank 0: alone, but the job has SLURM_NTASKS=4", "srun"),
    "one GPU for two": (check_devices, ranks(GPUS[0], GPUS[0]), "all ranks: GPU A on here is shared", "each GPU"),
    "two of three": (check_devices, ranks(GPUS[0], GPUS[1], GPUS[1]), "ranks 1, 2: GPU B on here", "each GPU"),
    "a GPU for one": (check_devices, ranks(GPUS[0], {}), "rank 1: no GPU, where others have one", "--no-cuda"),
    "a device that stops": (check_devices, ranks({}, {"device_error": "as it says"}), "rank 1: no dev", "as it says"),
    "two versions": (
        check_versions,
        ranks({"versions": {"torch": "2.15"}}, {"versions": {"torch": "2.14"}}),
        "rank 1: torch 2.14",
        "rank 0 has torch 2.15",
    ),
    "one CPU for two": (check_cpus, ranks({}, {"cpus": [0]}), "all ranks: 0 CPUs of its own", "fewer ranks on a node"),
    "a worker too many": (check_cpus, ranks({}, {}, workers=1), "all ranks: 1 CPU of its own", "--num-workers 0"),
    "not inherited": (check_cpus, ranks({}, asked=4), "rank 0: 1 CPU, but --cpus-per-task=4", "srun --cpus-per-task="),
    "a small machine": (check_cpus, ranks({}, asked=9), "rank 0: 1 CPU, but", "at most --cpus-per-task=8"),
    "too many threads": (check_cpus, ranks({}, threads=4), "rank 0: 1 CPU of its own for OMP_NUM", "OMP_NUM_THREADS=1"),
    "loopback": (
        check_network,
        ranks(*TWO_HOSTS, loopback=True, interface="lo"),
        "rank 0: lo does not leave one; rank 1: lo does not leave two",
        "GLOO_SOCKET_IFNAME",
    ),
    "NCCL's interface": (
        check_network,
        ranks(*TWO_HOSTS, loopback=True, backend="nccl"),
        "rank 0",
        "export MASTER_ADDR= the first node's name, and NCCL_SOCKET_IFNAME",
    ),
    "no sum": (check_reduce, ranks({}, {"reduce_error": "NaN"}), "rank 1: NaN", "--no-cuda"),
    "a skew": (check_clocks, ranks({}, {"skew": -1.5, "host": "two"}), "rank 1: 1.5 s behind rank 0", "clock of two"),
    "another folder": (check_folder, ranks({}, {"folder_error": "not there"}), "rank 1: not there", "--run-dir"),
    "other digits": (check_dataset, ranks({}, {"data": "digits ab"}), "rank 1: digits ab, where others", "one --data"),
    "no data on rank 0": (check_dataset, ranks({"data": "", "data_error": "Get."}, {}), "rank 0: no whole", "Get."),
    "no space": (check_space, ranks({}, {"free": 10**9 - 10**7}), "rank 1: 0.99 GB free for runs", "make room"),
    "no shared memory": (check_shm, ranks({"shm": 2**25}, workers=2), "rank 0: 32 MB for 2 workers", "--shm-size"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_row_is_green(name):
    check, everyone, seen = RIGHT[name]
    row = check(everyone)
    assert row.ok and seen in row.seen and not row.cure


@pytest.mark.parametrize("name", WRONG)
def test_a_row_is_red_with_the_rank_and_a_cure(name):
    check, everyone, seen, cure = WRONG[name]
    row = check(everyone)
    assert not row.ok and row.seen.startswith(seen) and cure in row.cure, row


def test_every_check_has_a_right_and_a_wrong_case():
    for cases in (RIGHT, WRONG):
        assert {case[0] for case in cases.values()} == set(TOGETHER)


def test_a_table_is_coloured_on_a_terminal_only_and_says_nothing_that_a_terminal_obeys(monkeypatch):
    rows = [Row("one", True, "seen"), Row("two", False, "a\x1b[2J\nb", "do\x07 it")]
    text = table(rows)
    assert "\x1b" not in text and "a [2J b" in text and "cure: do  it" in text and len(text.splitlines()) == 5
    monkeypatch.setattr(doctor.sys, "stdout", terminal := io.StringIO())
    terminal.isatty = lambda: True
    assert "\x1b[32mok " in table(rows) and "\x1b[31mRED" in table(rows) and "\x1b[2J" not in table(rows)
    assert plain("ü µ") == "ü µ"


def test_a_line_with_which_a_call_stops_is_kept_and_what_others_say_is_not(capsys):
    def call():
        print("a warning", file=sys.stderr)
        thread = threading.Thread(target=lambda: print("the alarm", file=sys.stderr))
        thread.start()
        thread.join()
        stop("the line")

    assert overhear(call) == (None, "the line")
    assert capsys.readouterr().err == "the alarm\na warning\n"
    assert overhear(lambda: 1 / 0) == (None, "division by zero") and overhear(lambda: 3) == (3, "")


def test_a_file_where_a_folder_should_be_is_said(tmp_path):
    (tmp_path / "file").touch()
    assert write_nonce(tmp_path / "file", "1").endswith("file cannot be written (File exists)")
    assert write_nonce(tmp_path / "file" / "runs", "1").endswith("runs cannot be written (Not a directory)")
    assert free(tmp_path / "file" / "runs") > 0 and write_nonce(tmp_path, "1") == "" and sees(tmp_path, "1")
    (tmp_path / ".doctor-2").write_text("another number")
    assert not sees(tmp_path, "2")


def test_the_file_that_all_must_see_is_gone_also_where_the_exchange_fails(tmp_path, monkeypatch):
    def fails(*_):
        assert [path.name[:8] for path in (tmp_path / "new" / "runs").iterdir()] == [".doctor-"]
        raise RuntimeError("a rank is lost")

    monkeypatch.setattr("torch.distributed.broadcast_object_list", fails)
    with pytest.raises(RuntimeError, match="lost"):
        share_file(Facts(folder=str(tmp_path / "new" / "runs")))
    assert list(tmp_path.iterdir()) == []
