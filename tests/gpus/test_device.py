"""Which device a rank takes: on simulated GPUs, and on pretended ones that CUDA cannot use."""

import json
import os
import sys
from unittest.mock import Mock, patch

import pytest
import torch
from simulated import run

from ddp_helpers.launch import launchers
from ddp_helpers.launch.machine import machine
from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.scripts import mnist_ddp

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."
OLD_GPU = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"
CPU = torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch):
    """Have this process see so many GPUs, none of which CUDA can use, for this reason."""

    def start(count, error):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", Mock())
        monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError(error)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return start


PICKS = """
import json, os, sys
from ddp_helpers.rank.device import pick_device
for visible, local_rank, env in json.loads(sys.argv[1]):
    if not os.fork():  # CUDA lives in one process, and torch is imported once
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible} | env
        try:
            picked = [str(pick_device(local_rank, no_cuda)) for no_cuda in (True, False)]
        except SystemExit as stopped:
            picked = str(stopped)
        print(json.dumps(picked), flush=True)
        os._exit(0)
    os.wait()
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1"}
MAY_SHARE = TORCHRUN | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def picked(simulated_gpus, cases):
    """What each rank takes with --no-cuda and without, or the line with which it stops, on simulated GPUs."""
    done = run(simulated_gpus, [sys.executable, "-c", PICKS, json.dumps(cases)], gpus=4)
    return list(map(json.loads, done.stdout.splitlines()))


def test_a_rank_claims_a_gpu_of_its_own_or_the_one_that_it_is_shown_or_stops(simulated_gpus):
    cases = [(count, local_rank) for count in (0, 1, 2, 4) for local_rank in range(4)]
    visible = [("0,1,2,3"[: max(0, 2 * count - 1)], local_rank, {}) for count, local_rank in cases]
    for (count, local_rank), seen in zip(cases, picked(simulated_gpus, visible), strict=True):
        if local_rank >= count > 1:
            assert (
                seen == f"local rank {local_rank} has no GPU ({count} here): start {count} on a node, or give --no-cuda"
            )
        else:
            mine = f"cuda:{local_rank if count > 1 else 0}"
            assert seen == ["cpu", mine if count else "cpu"]


def test_two_ranks_of_torchrun_on_one_gpu_stop_unless_nccl_was_told(simulated_gpus):
    cases = [("0", local_rank, env) for env in (TORCHRUN, MAY_SHARE) for local_rank in (0, 1)]
    stops = "local rank 1 has no GPU (1 here): start 1 on a node, or give --no-cuda"
    assert picked(simulated_gpus, cases) == [["cpu", "cuda:0"], stops, ["cpu", "cuda:0"], ["cpu", "cuda:0"]]


@pytest.mark.parametrize(
    ("error", "says"), [(OLD_DRIVER, "too old (found version 12020)"), (OLD_GPU, "no kernel image")]
)
def test_a_gpu_that_cuda_cannot_use_is_left_with_one_line_and_one_that_was_given_stops(
    error, says, pretend, monkeypatch, capsys
):
    pretend(2, error)
    assert pick_device(0) == CPU
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("the CPU is used, and not the GPU: ") and says in line
    assert pick_device(0, no_cuda=True) == CPU and capsys.readouterr().err == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SystemExit) as ended:
        pick_device(0)
    assert ended.value.code.startswith("GPU 0,1 is given, but ") and says in ended.value.code


GIVEN = {  # what stands in the environment of a process that was given GPUs, and of one that was not
    "by hand": ({"CUDA_VISIBLE_DEVICES": "0,1"}, "GPU 0,1 is given, but torch"),
    "by its number": ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, "GPU GPU-8932f937 is given"),
    "a job's": ({"SLURM_JOB_GPUS": "3"}, "GPU 3 is given"),
    "hidden": ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "2"}, ""),
    "hidden, too": ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
    "no device of a node": ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
    "none": ({}, ""),
}


@pytest.mark.parametrize("case", GIVEN)
def test_gpus_that_were_given_and_are_not_seen_stop_a_run(case, monkeypatch):
    env, says = GIVEN[case]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # also where there are some
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if says:
        with pytest.raises(SystemExit, match=says):
            pick_device(0)
    else:
        assert pick_device(0) == CPU
    assert pick_device(0, no_cuda=True) == CPU


def test_a_notebook_asks_cuda_in_another_process_and_says_once_that_it_cannot_use_a_gpu(tmp_path, monkeypatch, capsys):
    """NVML's count is pretended, and CUDA is the installed one, which finds neither a driver nor a GPU."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cuda.device_count = lambda: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started in the notebook"))
    launchers._ask_cuda.cache_clear()
    assert "no GPU" in machine() and not launchers.enough_gpus(1)
    assert launchers.launch_environment([2], {})["CUDA_VISIBLE_DEVICES"] == ""
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "the CPU is used, and not the GPU: " in line, line
    launchers._ask_cuda.cache_clear()


@pytest.mark.parametrize(
    ("env", "cpus", "workers"),
    [({}, 1, 0), ({}, 4, 3), ({}, 128, 8), ({"SLURM_CPUS_PER_TASK": "4"}, 128, 3), ({"LOCAL_WORLD_SIZE": "2"}, 8, 3)],
)
def test_a_rank_on_a_gpu_starts_a_worker_for_each_other_cpu_eight_at_most(env, cpus, workers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["mnist_ddp.py"])
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    with patch.dict(os.environ, env):
        assert mnist_ddp.read_flags(1).num_workers == workers
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mnist_ddp.read_flags(1).num_workers == 0, "without a GPU the CPUs train"
