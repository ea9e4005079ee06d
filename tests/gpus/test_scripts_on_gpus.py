"""What scripts and launchers do on GPUs, as far as a machine without one can tell."""

import ctypes
import mmap
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_helpers.launch import launchers
from ddp_helpers.rank.doctor.case import capture
from ddp_helpers.rank.scripts import mnist_ddp

TORCH = Path(torch.__file__).parent
# What both classes make of NCCL's error 5; the reason is in the last line.
FORMATS = {
    "ProcessGroupNCCL": "NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {error}, NCCL version 2.30.7\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n{last}\n"
    "Exception raised from create at NCCLUtils.cpp:94 (most recent call first):\nframe #0: c10::Error::Error()",
    "ProcessGroupNCCL2": "Failed to initialize NCCL communicator: {error} \nNCCL Last Error: {last}",
}
IN_TORCH = b"NCCL error in: ", b"\nLast error:", b"Failed to initialize NCCL communicator: ", b"NCCL Last Error: "


@pytest.fixture(scope="module")
def nccl():
    """What the installed NCCL says: of an invalid usage, why it failed without a GPU, and of two ranks on one GPU."""
    path = TORCH.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    if not path.exists():
        pytest.skip("this torch has no NCCL beside it")
    library = ctypes.CDLL(str(path))
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [ctypes.c_void_p]
    library.ncclGetUniqueId(ctypes.byref((ctypes.c_byte * 128)()))
    last = library.ncclGetLastError(None).decode() or "Cuda failure"
    twice = re.search(rb"Multiple Ranks are using the same GPU/Partition[^\0]*", path.read_bytes())
    return library.ncclGetErrorString(5).decode(), last, twice[0].decode()


def test_an_error_of_nccl_keeps_its_reason_in_a_line_of_the_script_and_in_the_doctors_row(nccl, monkeypatch):
    error, *reasons = nccl
    assert "NCCL_DEBUG=WARN" in error and "NCCL_MULTI_RANK_GPU_ENABLE=1" in reasons[1]
    with (TORCH / "lib" / "libtorch_cuda.so").open("rb") as file:
        words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert all(words.find(one) >= 0 for one in IN_TORCH)
    for form, reason in product(FORMATS.values(), reasons):

        def refused(*_, form=form, reason=reason, **__):
            raise dist.DistBackendError(form.format(error=error, last=reason))

        monkeypatch.setattr(dist, "init_process_group", refused)
        with pytest.raises(SystemExit) as ended:
            mnist_ddp.form_group(0, 1, torch.device("cpu"), 5)
        for line in (ended.value.code, capture(refused)[1]):
            assert error in line and reason in line, line
            assert not any(noise in line for noise in ("\n", "c10::Error", "raised from", "frame #0")), line


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
