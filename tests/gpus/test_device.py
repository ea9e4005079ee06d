"""Which device a rank takes: GPUs are pretended, those that CUDA cannot use among them."""

import os
import sys
from unittest.mock import patch

import pytest
import torch

from ddp_helpers.launch import launchers
from ddp_helpers.launch.machine import machine
from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.scripts import mnist_ddp

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."
OLD_GPU = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"
CPU = torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch):
    """Have this process see so many GPUs, of which CUDA can use all or, with an error, none; gives what is claimed."""

    def start(count, error=""):
        claimed = []

        def run_kernel(*size, device):
            if error:
                raise RuntimeError(error)
            return torch.ones(*size)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
        monkeypatch.setattr(torch, "zeros", run_kernel)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return claimed

    return start


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
@pytest.mark.parametrize("local_rank", range(4))
def test_a_rank_claims_a_gpu_of_its_own_or_the_one_that_it_is_shown_or_stops(gpus, local_rank, pretend):
    claimed = pretend(gpus)
    if local_rank >= gpus > 1:
        with pytest.raises(SystemExit, match=rf"local rank {local_rank} has no GPU \({gpus} here\): start {gpus} "):
            pick_device(local_rank)
    elif gpus:
        assert [pick_device(local_rank)] == claimed == [torch.device("cuda", local_rank if gpus > 1 else 0)]
    assert gpus or pick_device(local_rank) == CPU
    assert pick_device(local_rank, no_cuda=True) == CPU and len(claimed) <= 1


@pytest.mark.parametrize(("variable", "stops"), [("", True), ("1", False)])
def test_two_ranks_of_torchrun_on_one_gpu_stop_unless_nccl_was_told(variable, stops, pretend, monkeypatch):
    claimed = pretend(1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    assert pick_device(0) == torch.device("cuda", 0)
    if stops:
        with pytest.raises(
            SystemExit, match=r"local rank 1 has no GPU \(1 here\): start 1 on a node, or give --no-cuda"
        ):
            pick_device(1)
    else:
        assert [*claimed, pick_device(1)] == [torch.device("cuda", 0)] * 2


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
def test_gpus_that_were_given_and_are_not_seen_stop_a_run(case, pretend, monkeypatch):
    env, says = GIVEN[case]
    pretend(0)
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
