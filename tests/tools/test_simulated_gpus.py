"""Simulated GPUs, `ddp-course gpus`: real processes, with torch's own C++ for CUDA and NCCL."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from real import LIMIT, fail_in_ci, until, weekly
from refusals import ended, refused
from simulated import IS_SHARED, built, run, start

from ddp_helpers import ROOT
from ddp_helpers.launch.launchers import free_port
from ddp_tools.simulated_gpus.command import refuse_beside_real_gpus

SCRIPTS = Path(__file__).parent / "simulated_gpus"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SPIRALS = ROOT / "notebooks" / "spirals_ddp.py"
NOTICE = "simulated GPUs: torch's own code for CUDA and NCCL runs, but on the CPU: speeds mean nothing"


@pytest.fixture(scope="module")
def cache(simulated_gpus):
    """The cache, which stays as it is when somebody builds once more."""

    def state():
        return {path: path.stat().st_mtime_ns for path in simulated_gpus.rglob("*")}

    before = state()
    assert before and built(simulated_gpus.parent) == simulated_gpus and state() == before
    return simulated_gpus


@contextmanager
def ranks(cache, mode, folder, **env):
    """Two ranks of ranks.py, each a process of its own; what still runs at the end is ended."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "TMPDIR": str(folder)}
    # One folder for NCCL's files, which each `gpus` would make for itself: so one `gpus` starts both.
    both = 'RANK=1 "$@" 2>"$0.err1" & RANK=0 "$@" 2>"$0.err0"; s=$?; echo $s >"$0.status0"; wait'
    words = ["bash", "-c", both, folder / mode, sys.executable, SCRIPTS / "ranks.py", mode, folder]
    process = start(cache, words, **place, **env)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def answers(cache, mode, folder, **env):
    """What both ranks write."""
    with ranks(cache, mode, folder, **env) as process:
        process.communicate(timeout=LIMIT)
    for rank in range(2):
        assert (folder / f"rank{rank}").is_file(), (folder / f"{mode}.err{rank}").read_text()
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]


# ---- what runs


def train(cache, ranks, folder, *words):
    """Train the spirals with a launcher, on simulated GPUs if there is a cache: what was printed, and the weights."""
    words = [*TORCHRUN, str(ranks), SPIRALS, "--epochs", "2", "--save", folder / "weights.pt", *words]
    if cache:
        done = run(cache, words)
        assert done.stderr.startswith(f"2 {NOTICE}\n")
    else:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, *words[len(TORCHRUN) + 1 :]]
        done = subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), torch.load(folder / "weights.pt")  # as on a machine without a GPU


def off_by(weights, others):
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def test_the_spirals_train_unchanged_on_one_and_two_simulated_gpus_as_on_the_cpu(cache, tmp_path):
    runs = {}
    for name, where, number, words in (
        ("cpu", None, 1, ()),
        ("control", None, 1, ("--lr", "0.11")),
        ("one", cache, 1, ()),
        ("two", cache, 2, ()),
    ):
        (folder := tmp_path / name).mkdir()
        runs[name] = train(where, number, folder, *words)
    for name, devices in (("one", ["cuda:0"]), ("two", ["cuda:0", "cuda:1"])):
        lines, weights = runs[name]
        assert sorted(line.split(", ")[-1] for line in lines if line.startswith("rank")) == devices
        assert [line for line in lines if "epoch" in line] == [line for line in runs["cpu"][0] if "epoch" in line]
        assert off_by(weights, runs["cpu"][1]) < 1e-6
    assert off_by(runs["control"][1], runs["cpu"][1]) > 1e-3


@pytest.mark.parametrize("name", ["spirals", "spirals_resumable"])
def test_what_is_saved_on_a_gpu_can_be_loaded_without_one(name, cache, tmp_path):
    words = [sys.executable, ROOT / "notebooks" / f"{name}.py", "--epochs", "1", "--save", tmp_path / "weights.pt"]
    words += ["--run-dir", tmp_path / "run"] if name == "spirals_resumable" else []
    done = run(cache, words)
    assert done.returncode == 0, done.stderr
    assert all(not tensor.is_cuda for tensor in torch.load(tmp_path / "weights.pt").values())


@pytest.fixture(scope="module")
def one_process(cache, tmp_path_factory):
    """What faults.py saw."""
    path = tmp_path_factory.mktemp("faults") / "answer.json"
    done = run(cache, [sys.executable, SCRIPTS / "faults.py", path])
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_operators_compute_what_the_cpu_computes(one_process):
    assert one_process["names"] == ["simulated GPU"] * 2
    losses = one_process["losses"]
    assert losses["cuda torch.float32"] == pytest.approx(losses["cpu torch.float32"], abs=1e-6)
    for low in ("bfloat16", "float16"):  # autocast and GradScaler; each device has its own list of operators for it
        assert losses[f"cuda torch.{low}"] == pytest.approx(losses["cpu torch.float32"], rel=0.05)
        assert losses[f"cuda torch.{low}"] != losses["cuda torch.float32"]


def test_what_has_operators_of_its_own_for_cuda_computes_what_the_cpu_computes(cache, tmp_path):
    done = run(cache, [sys.executable, SCRIPTS / "operators.py", tmp_path / "answer.json"])
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["off"].pop("control") > 1e-3
    assert len(answer["off"]) == 16 and all(off < 1e-5 for off in answer["off"].values()), answer["off"]
    # Its own refusals stay PyTorch's: flash attention takes no float32.
    assert answer["flash"] == ["torch.float16", "No available kernel. Aborting execution."]


BOTH = "RuntimeError: Expected all tensors to be on the same device, but "
TWO = f"{BOTH}found at least two devices, cuda:0 and cpu!"
FAULTS = {  # what a GPU does not forgive, in PyTorch's words
    "the batch stays on the CPU": f"{BOTH}got mat1 is on cpu, different from other tensors on cuda:0",
    "the targets stay on the CPU": f"{BOTH}got target is on cpu, different from other tensors on cuda:0",
    "class weights stay on the CPU": f"{BOTH}got weight is on cpu, different from other tensors on cuda:0",
    "the model stays on the CPU": f"{BOTH}got weight is on cpu, different from other tensors on cuda:0",
    "buffers stay on the CPU": f"{BOTH}got weight is on cpu, different from other tensors on cuda:0",
    "batch and weights on two GPUs": f"{BOTH}got mat1 is on cuda:1, different from other tensors on cuda:0",
    "a sum of both": TWO,
    "a loss of both": TWO,
    "a mask of the CPU": TWO,
    "an argmax compared on the CPU": TWO,
    "a counter on the CPU": TWO,
    "a list of both": f"{BOTH}got tensors is on cpu, different from other tensors on cuda:0",
    "words stay on the CPU": f"{BOTH}got index is on cpu, different from other tensors on cuda:0",
    "numpy": "TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()",
    "pinned": "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    "a GPU that is not there": "AcceleratorError: CUDA error: invalid device ordinal",
    "a generator of the CPU": "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
    "a generator of the GPU": "RuntimeError: Expected a 'cpu' device type for generator but found 'cuda'",
    "too much memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 66.00 MiB. "
    "GPU 0 has a total capacity of 64.00 MiB of which ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_gpu_does_not_forgive_is_not_forgiven(fault, one_process):
    assert one_process["faults"].keys() == FAULTS.keys()
    assert one_process["faults"][fault].startswith(FAULTS[fault])


def test_what_a_gpu_takes_is_taken(one_process):
    assert {name: got for name, (got, _) in one_process["fine"].items()} == {
        name: wanted for name, (_, wanted) in one_process["fine"].items()
    }


def test_a_cuda_graph_computes_what_the_same_steps_do_and_computes_nothing_while_it_is_recorded(one_process):
    (eager, _), (played, changed) = one_process["graph"]["eager"], one_process["graph"]["graph"]
    assert played == eager and not changed
    assert len(set(played[3:])) == 5  # each launch draws its own dropout, and takes its own batch


def test_what_the_host_would_wait_for_cannot_be_recorded(one_process):
    *refused, taken = one_process["asked"]
    assert all(said.startswith("AcceleratorError: CUDA error: operation") for said in refused) and taken == "nothing"


@weekly  # a minute, most of it PyTorch's compiler
def test_a_compiled_kernel_is_refused_with_the_variable_that_runs_it_without(cache):
    if not Path(sysconfig.get_path("include"), "Python.h").exists():  # Triton compiles with it
        fail_in_ci("no headers of Python on this machine: install python3-dev")
    script = "import torch; print(torch.compile(lambda x: x.relu() + 1)(torch.ones(1, device='cuda')).item())"
    refused = run(cache, [sys.executable, "-c", script])
    assert refused.returncode == 1
    assert "a simulated GPU runs no compiled kernels: export TORCH_COMPILE_DISABLE=1 to run without" in refused.stderr
    assert run(cache, [sys.executable, "-c", script], TORCH_COMPILE_DISABLE="1").stdout == "2.0\n"


# ---- NCCL


@pytest.fixture(scope="module")
def two_ranks(cache, tmp_path_factory):
    """What both ranks saw of collectives."""
    return answers(cache, "collectives", tmp_path_factory.mktemp("ranks"))


def test_each_collective_brings_what_it_should(two_ranks):
    for rank, answer in enumerate(two_ranks):
        assert answer["class"] in ("ProcessGroupNCCL", "ProcessGroupNCCL2")  # the latter from torch 2.15 on
        assert len(answer["sums"]) == 7 and all(got == [3, 6, 9] for got in answer["sums"].values())
        assert answer["reduced"] == {
            "AVG": [1.5, 3, 4.5],
            "MAX": [2, 4, 6],
            "MIN": [1, 2, 3],
            "PRODUCT": [2, 8, 18],
        }
        assert len(answer["scaled"]) == 4 and all(got == [3, 6, 3 * (rank + 1)] for got in answer["scaled"].values())
        assert answer["moved"] == {
            "whole": [0, 1, 10, 11],
            "part": [10 + 2 * rank],
            "sent": [10, 11],
            "swapped": [rank, 10 + rank],
            "scattered": [5 * rank, 5 * rank + 1],
            "received": [10 * (1 - rank), 10 * (1 - rank) + 1],
            "alone": [1],
            "gathered": None if rank else [[0, 1], [10, 11]],
            "objects": [{"rank": 0}, {"rank": 1}],
        }
        assert answer["graph"] == [[1, 1], [1.5, 1.5], [2.25, 2.25], [3.375, 3.375]]


def test_sync_batch_norm_and_fsdp_train_as_one_process_with_the_whole_batch(cache, tmp_path):
    for answer in answers(cache, "training", tmp_path):
        assert answer["SyncBatchNorm"] < 1e-2 < 1 < answer["BatchNorm"]
        assert answer["fully_shard"] < 1e-4 < 1e-2 < answer["untrained"]


def test_it_waits_for_who_is_late_asks_for_something_else_or_has_died_until_it_is_aborted(two_ranks):
    assert two_ranks[0]["late"] == [[True, True]] * 2  # it waited, and then had the sum, or what was gathered
    assert all(answer["gathered late"] == [[1, 1], [2, 2]] for answer in two_ranks)
    assert all(answer["other"] for answer in two_ranks)
    assert two_ranks[0]["dead"] and two_ranks[0]["aborted"]


def test_a_tensor_of_the_cpu_is_refused(two_ranks):
    assert [answer["cpu"] for answer in two_ranks] == ["No backend type associated with device type cpu"] * 2


@pytest.mark.parametrize("may", ["", "1"])
def test_two_ranks_on_one_gpu_are_refused_and_allowed_by_the_variable(may, cache, tmp_path):
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": may, "NCCL_DEBUG": "WARN"}
    for rank, answer in enumerate(answers(cache, "sharing", tmp_path, **env)):
        log = (tmp_path / f"sharing.err{rank}").read_text()
        older = f" : rank {rank} and rank {1 - rank} both on CUDA device 1000"
        duplicate = IS_SHARED + older * IS_SHARED.startswith("Duplicate")
        assert (duplicate in log) == (not may)
        if may:
            assert answer == {"error": "nothing", "sum": 2}
        else:
            assert "invalid usage (run with NCCL_DEBUG=WARN for details)" in answer["error"] and answer["sum"] == 1


@pytest.mark.parametrize(("newer", "name"), [("0", "ProcessGroupNCCL"), ("1", "ProcessGroupNCCL2")])
def test_backward_goes_on_behind_a_late_all_reduce_with_the_older_class_alone(newer, name, cache, tmp_path):
    waiting, _ = both = answers(cache, "future", tmp_path, TORCH_DIST_USE_NCCL2=newer)
    assert waiting["started"] == (newer == "0")
    assert all(answer["class"] == name and answer["numbers"] == [[2] * 4, [2] * 4] for answer in both)


def test_a_rank_that_never_comes_is_seen_by_torchs_own_watchdog_and_flight_recorder(cache, tmp_path):
    recorder = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_rank_")}
    recorder |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000", "TORCH_DIST_USE_NCCL2": "0"}
    status, dumps = tmp_path / "hanging.status0", [tmp_path / "fr_rank_0", tmp_path / "fr_rank_1"]
    with ranks(cache, "hanging", tmp_path, **recorder):
        until(lambda: status.exists() and status.read_text(), "the watchdog ends rank 0")
        until(lambda: all(dump.exists() and dump.stat().st_size for dump in dumps), "both recorders' files")
    assert int(status.read_text()) == 128 + signal.SIGABRT
    log = (tmp_path / "hanging.err0").read_text()
    assert "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=4, " in log
    assert "we are taking the entire process down" in log
    trace = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", tmp_path, "-p", "fr_rank_"]
    words = [*map(str, trace), "--allow-incomplete-ranks"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    said = shown.stdout + shown.stderr
    assert "missing ranks: {1}" in said and "ranks.py:" in said, said


# ---- the command

VISIBLE = {"0": [1], "1,0": [2, 1], "": [], "-1": [], "0,7,1": [1]}


def test_the_command_sees_the_gpus_that_cuda_visible_devices_names(cache):
    """By the number in each one's PCI address; the forks of one process have imported torch once."""
    script = """
import os, sys, torch
for words in sys.argv[1:]:
    if not os.fork():
        os.environ["CUDA_VISIBLE_DEVICES"] = words
        print([torch.cuda.get_device_properties(i).pci_bus_id for i in range(torch.cuda.device_count())], flush=True)
        os._exit(0)
    os.wait()
"""
    done = run(cache, [sys.executable, "-c", script, *VISIBLE])
    assert list(map(json.loads, done.stdout.splitlines())) == list(VISIBLE.values()), done.stderr


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_status_is_the_commands(script, status, cache):
    assert run(cache, ["bash", "-c", script]).returncode == status


def test_it_is_ended_with_what_ends_it_and_leaves_nothing(cache, tmp_path):
    script = 'trap "exit 5" TERM; mkdir "$SIMULATED_GPUS_FOLDER/x"; touch begun; while :; do sleep 0.1; done'
    process = start(cache, ["bash", "-c", f"cd '{tmp_path}'; {script}"], TMPDIR=str(tmp_path))
    until((tmp_path / "begun").exists, "the command begins")
    process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == 5
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]


@pytest.mark.parametrize("name", ["nvidia0", "nvidia12", "dxg"])
def test_it_is_refused_beside_a_gpu_that_serves(name, tmp_path):
    (tmp_path / "nvidiactl").touch()  # of the driver, without a GPU
    refuse_beside_real_gpus(tmp_path)
    (tmp_path / name).touch()
    refused(refuse_beside_real_gpus, tmp_path, named=(str(tmp_path / name), "--beside-real-gpus"))


REFUSED = {  # the words after `gpus`, and what the one line names
    "2": "gpus needs a command",
    "0 -- ls": "0 GPUs of 2048 MB",
    "2 --memory-mb 0 -- ls": "2 GPUs of 0 MB",
    "2 -- no_such_program": "no_such_program",
}


def gpus(words, *before, cwd=None, **env):
    """`ddp-course gpus`, where no test has built anything."""
    command = [*before, sys.executable, "-m", "ddp_helpers", "gpus", "--beside-real-gpus", *words.split()]
    lean = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, env=lean, cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_used_is_one_line(words):
    done = gpus(words)
    ended(done.returncode, done.stdout, done.stderr, REFUSED[words])


def test_where_they_cannot_be_built_one_line_says_why(tmp_path):
    def ends(named, *before, **env):
        done = gpus("1 -- /bin/true", *before, XDG_CACHE_HOME=str(tmp_path / "cache"), **env)
        ended(done.returncode, done.stdout, done.stderr, named)

    ends("apt-get install g++", PATH=str(tmp_path))
    ends("i686", "setarch", "i686")
    (other := tmp_path / "other" / "torch").mkdir(parents=True)
    (other / "__init__.py").touch()
    path = f"{other.parent}:{ROOT}"
    for cuda, named in ((None, "built without CUDA"), ("13.0", "cuda_runtime_api.h")):
        (other / "version.py").write_text(f"__version__, cuda = '2.14.1', {cuda!r}\n")
        ends(named, PYTHONPATH=path)
    assert not (tmp_path / "cache").exists() or not any((tmp_path / "cache").rglob("*.so*"))


SLOW_COMPILER = """#!/bin/bash
[ "$1" = --version ] && exit
touch "$(dirname "$0")/started.$PPID"
until [ "$(ls "$(dirname "$0")" | grep -c started)" = 2 ]; do sleep 0.05; done
while [ "$1" != -o ]; do shift; done
echo >"$2"
"""


def test_two_that_build_at_once_share_what_one_has_made(tmp_path):
    """The compiler is a script here, which waits until both have begun."""
    (tmp_path / "compiler").mkdir()
    (compiler := tmp_path / "compiler" / "g++").write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    env = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    code = "from ddp_tools.simulated_gpus.build import build; print(build())"
    pipes = {"stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(2)]
    said = {process.communicate(timeout=LIMIT)[0] for process in both}
    [folder] = (tmp_path / "cache" / "ddp-course").iterdir()
    assert said == {f"{folder}\n"} and (folder / "operators.so").is_file()
