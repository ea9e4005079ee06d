"""Which device a rank takes: GPUs are pretended, those that CUDA cannot use among them."""

import os
import runpy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.launch import launchers
from ddp_helpers.launch.machine import machine
from ddp_helpers.rank.device import pick_device

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."
NEW, OLD = (8, 9), (7, 0)  # an sm_89 runs what was built for sm_86; of sm_70 nothing is built any more
CPU = torch.device("cpu")


@pytest.fixture
def pretend(monkeypatch):
    """Have this process see GPUs of these capabilities, and CUDA start or fail; gives what is claimed."""

    def start(*capabilities, error=None):
        def init():
            if error:
                raise RuntimeError(error)

        claimed = []
        cards = [SimpleNamespace(name="V100", major=major, minor=minor) for major, minor in capabilities]
        pretended = {"device_count": lambda: len(cards), "get_device_properties": cards.__getitem__, "init": init}
        pretended |= {"get_arch_list": lambda: ["sm_75", "sm_86"], "set_device": claimed.append}
        for name, value in pretended.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return claimed

    return start


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
@pytest.mark.parametrize("local_rank", range(4))
def test_a_rank_claims_a_gpu_of_its_own_or_the_one_that_it_is_shown_or_stops(gpus, local_rank, pretend):
    claimed = pretend(*[NEW] * gpus)
    if local_rank >= gpus > 1:
        refused(pick_device, local_rank, named=[f"local rank {local_rank} ", f"({gpus} here)", "--no-cuda"])
    elif gpus:
        assert [pick_device(local_rank)] == claimed == [torch.device("cuda", local_rank if gpus > 1 else 0)]
    assert gpus or pick_device(local_rank) == CPU
    assert pick_device(local_rank, no_cuda=True) == CPU and len(claimed) <= 1


@pytest.mark.parametrize(("variable", "version", "stops"), [("", 30, True), ("1", 29, True), ("1", 30, False)])
def test_two_ranks_of_torchrun_on_one_gpu_stop_unless_nccl_was_told(variable, version, stops, pretend, monkeypatch):
    claimed = pretend(NEW)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, version, 7))
    assert pick_device(0) == torch.device("cuda", 0)
    if stops:
        refused(pick_device, 1, named=["local rank 1 ", "(1 here)", "--nproc-per-node 1", "--no-cuda"])
    else:
        assert [*claimed, pick_device(1)] == [torch.device("cuda", 0)] * 2


UNUSABLE = {
    "an old driver": ([NEW, NEW], OLD_DRIVER, "there are 2 GPU(s)", "too old (found version 12020)"),
    "an old GPU": ([OLD], None, "V100 is sm_70, and this torch is built for sm_75 sm_86", "install a torch"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_gpu_that_cuda_cannot_use_is_left_with_one_line_and_one_that_was_given_stops(
    case, pretend, monkeypatch, capsys
):
    capabilities, error, *named = UNUSABLE[case]
    claimed = pretend(*capabilities, error=error)
    assert pick_device(0) == CPU and claimed == []
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and all(text in line for text in [*named, "CPU"]), line
    assert pick_device(0, no_cuda=True) == CPU and capsys.readouterr().err == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    refused(pick_device, 0, named=["CUDA_VISIBLE_DEVICES=0, but", *named, "--no-cuda"])


def test_of_two_kinds_of_gpu_only_those_before_the_first_old_one_count(pretend):
    pretend(NEW, OLD)
    assert pick_device(0) == torch.device("cuda", 0)
    pretend(NEW, NEW, OLD)
    refused(pick_device, 2, named=["(2 here)"])


def test_a_notebook_asks_cuda_in_another_process_and_says_once_that_it_cannot_use_a_gpu(tmp_path, monkeypatch, capsys):
    """NVML's count is pretended, and CUDA is the installed one, which finds neither a driver nor a GPU."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cuda.device_count = lambda: 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was started in the notebook"))
    launchers._ask_cuda.cache_clear()
    assert "no GPU" in machine() and not launchers.enough_gpus(1)
    assert launchers.launch_environment([2], {})["CUDA_VISIBLE_DEVICES"] == ""
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "there are 2 GPU(s)" in line and "can use none" in line, line
    launchers._ask_cuda.cache_clear()


def test_tests_have_no_gpu_and_neither_has_what_they_start():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


@pytest.mark.parametrize(("cpus", "workers"), [(1, 0), (4, 3), (128, 8)])
def test_a_machine_with_many_cpus_starts_no_more_loaders_than_a_process_can_open_files(cpus, workers):
    path = ROOT / "ddp_helpers" / "rank" / "arguments.py"
    with patch("os.sched_getaffinity", lambda _: range(cpus), create=True), patch("os.cpu_count", lambda: cpus):
        assert runpy.run_path(str(path))["read_flags"]({}, []).num_workers == workers
