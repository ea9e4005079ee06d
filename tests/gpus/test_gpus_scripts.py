"""What scripts and launchers do on GPUs, as far as a machine without one can tell."""

import ctypes
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from real import python

from ddp_helpers.launch import launchers
from ddp_helpers.rank.scripts import mnist_ddp

# What both classes make of NCCL's error 5; the reason is in the last line.
FORMATS = {
    "ProcessGroupNCCL": "NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {error}, NCCL version 2.30.7\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n{last}\n"
    "Exception raised from create at NCCLUtils.cpp:94 (most recent call first):\nframe #0: c10::Error::Error()",
    "ProcessGroupNCCL2": "Failed to initialize NCCL communicator: {error} \nNCCL Last Error: {last}",
}


@pytest.fixture(scope="module")
def nccl():
    """The installed library's words for an invalid usage, and for the last error, of a machine without a GPU."""
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    library = ctypes.CDLL(str(next(path for folder in folders for path in Path(folder).glob("nccl/lib/libnccl.so.2"))))
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [ctypes.c_void_p]
    number = (ctypes.c_byte * 128)()
    library.ncclGetUniqueId(ctypes.byref(number))
    return library.ncclGetErrorString(5).decode(), library.ncclGetLastError(None).decode()


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_an_error_of_nccl_keeps_its_reason(text, nccl, monkeypatch):
    error, last = nccl[0], nccl[1] or "Multiple Ranks are using the same GPU/Partition"

    def refused(*_, **__):
        raise dist.DistBackendError(text.format(error=error, last=last))

    monkeypatch.setattr(dist, "init_process_group", refused)
    with pytest.raises(SystemExit) as ended:
        mnist_ddp.join(0, 1, torch.device("cpu"), 5)
    line = ended.value.code
    assert "\n" not in line and error in line and last in line and "frame #0" not in line, line


ASKS_FOR_NCCL = """
import torch, torch.distributed as dist
from ddp_helpers.rank.scripts.mnist_ddp import join, pick_device
torch.cuda.device_count = lambda: 1  # and what the claim would do to it
torch.cuda.set_device = lambda device: None
torch.zeros = lambda *size, device: torch.ones(1)
pick_device(0)
init = dist.init_process_group
dist.init_process_group = lambda backend, device_id, **more: init(backend, **more)  # which would be refused before
join(0, 1, torch.device("cuda", 0), 5)
group = dist.distributed_c10d._get_default_group()
print(type(group._get_backend(torch.device("cuda"))).__name__)  # torch 2.14's newer class asks for no GPU yet
"""


@pytest.mark.parametrize(
    ("env", "answer"),
    [
        ({}, "ProcessGroupNCCL is only supported with GPUs"),
        ({"TORCH_DIST_USE_NCCL2": "1"}, "nccl2 requires|^ProcessGroupNCCL2$"),
    ],
    ids=["as it comes", "by request"],
)
def test_ranks_take_the_older_class_unless_another_is_asked_for(env, answer):
    if env and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        pytest.skip(f"torch {torch.__version__} has one class only")
    path = {"PYTHONPATH": ":".join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    done = python("-c", ASKS_FOR_NCCL, env=path | env)
    assert re.search(answer, done.stdout + done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("gpus", "ranks", "variable", "hidden"),
    [
        (0, [2], "1", True),
        (1, [1], "", False),
        (1, [2], "", True),
        (1, [2], "1", False),
        (1, [1, 1], "1", True),
        (2, [2], "", False),
        (2, [4], "1", True),
    ],
)
def test_ranks_share_a_gpu_only_where_nccl_is_asked_to(gpus, ranks, variable, hidden, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(launchers, "gpu_names", lambda: ["a GPU"] * gpus)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    env = launchers.launch_environment(ranks, {})
    assert [env.get(name) == "" for name in launchers.HIDES_GPUS] == [hidden] * 3
