"""What the doctor, the recorders of a hang and `fits` say on GPUs: tested with the installed libraries, without one."""

import json
import mmap
import os
import re
from argparse import Namespace
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from doctors import red, seen_by
from faults.ranks import Ranks
from real import python
from torch._C import _distributed_c10d as c10d

from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture_trouble
from ddp_helpers.rank.doctor.checks import check_versions
from ddp_helpers.rank.doctor.reduce import in_time
from ddp_helpers.tools import cards, fits, watched, who_hangs

TORCH = Path(torch.__file__).parent
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def lone(rank=0, size=1, timeout=0, store=None):
    """A rank under examination."""
    return Case(
        "torchrun",
        rank,
        rank,
        size,
        Namespace(timeout=timeout, no_cuda=False),
        store or dist.HashStore(),
    )


# ---- an init that blocks

BLOCKED = """
import pathlib, time
import torch.distributed as dist
from ddp_helpers.rank.scripts import doctor

right = dist.init_process_group

def slow(*words, **named):
    time.sleep(25)
    pathlib.Path("OVER").touch()
    right(*words, **named)

dist.init_process_group = slow
doctor.main()
"""


def test_an_init_that_blocks_is_red_and_the_doctor_does_not_wait_for_it(tmp_path):
    (tmp_path / "blocked.py").write_text(BLOCKED.replace("OVER", str(tmp_path / "over")))
    flags = ["--data", "none", "--run-dir", tmp_path, "--timeout", 3]
    with Ranks(tmp_path / "blocked.py", flags, 2, tmp_path / "ranks", env={"GLOO_SOCKET_IFNAME": ""}) as ranks:
        ended = ranks.wait()
        assert not (tmp_path / "over").exists()
    assert ended.statuses == [1, 1]
    red_rows = red("\n".join(line for line in ended.said[0].splitlines() if line and line[:6] != "left: "))
    assert list(red_rows) == ["all-reduce"]
    seen, cure = red_rows["all-reduce"]
    assert "init" in seen and "GLOO_SOCKET_IFNAME" in seen and "lo" in seen
    assert cure.startswith("export GLOO_SOCKET_IFNAME=")


@pytest.mark.parametrize(
    ("hosts", "value", "seen", "cure"),
    [
        (
            2,
            "",
            "NCCL_SOCKET_IFNAME is not set, and there are lo, ib0",
            "export NCCL_SOCKET_IFNAME=",
        ),
        (2, "eth7", "NCCL_SOCKET_IFNAME is eth7", "export NCCL_SOCKET_IFNAME="),
        (1, "", "NCCL_SOCKET_IFNAME is not set", "NCCL_P2P_DISABLE=1"),
    ],
)
def test_where_nccl_blocks_its_interface_is_named(hosts, value, seen, cure, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    monkeypatch.setattr("torch.accelerator.device_index", lambda _: patch.dict({}))  # the GPU that is not here
    case, never = lone(), Event()
    case.store.add("hosts", hosts)
    with pytest.raises(CheckFailed) as caught:
        in_time(case, torch.device("cuda", 0), "init", never.wait)
    never.set()
    assert seen in caught.value.args[0] and cure in caught.value.args[1] and case.blocked


# ---- NCCL's own words

NCCL = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
Id = type("Id", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * 128)]})
its = Id()
library.ncclGetUniqueId(ctypes.byref(its))
library.ncclCommInitRank(ctypes.byref(ctypes.c_void_p()), 1, its, 0)
print(json.dumps([library.ncclGetErrorString(5).decode(), library.ncclGetLastError(None).decode()]))
"""
FRAMES = (
    "\nException raised from check at NCCLUtils.cpp:94 (most recent call first):\nframe #0: c10::Error::Error()\n#1 x"
)


@pytest.fixture(scope="module")
def nccl():
    """What the installed NCCL says: of an invalid usage, why it failed without a GPU, and of two ranks on one GPU."""
    library = TORCH.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    if not library.exists():
        pytest.skip("this torch has no NCCL beside it")
    usage, last = json.loads(python("-c", NCCL, library, env=NO_GPU).stdout.splitlines()[-1])
    twice = re.search(rb"Multiple Ranks are using the same GPU/Partition[^\0]*", library.read_bytes())
    return usage, last, twice[0].decode()


def test_both_classes_give_the_reason_in_a_later_line_and_it_is_kept(nccl):
    usage, last, twice = nccl
    assert "NCCL_DEBUG=WARN" in usage and "Cuda failure" in last and "NCCL_MULTI_RANK_GPU_ENABLE=1" in twice
    older = "NCCL error in: NCCLUtils.cpp:94, {}, NCCL version 2.30.7\nncclInvalidUsage: ….\nLast error:\n{}"
    newer = "Failed to initialize NCCL communicator: {} \nNCCL Last Error: {}"
    with (TORCH / "lib" / "libtorch_cuda.so").open("rb") as file:
        words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        known = [
            b"NCCL error in: ",
            b"\nLast error:",
            b"Failed to initialize NCCL communicator: ",
            b"NCCL Last Error: ",
        ]
        assert all(words.find(one) >= 0 for one in known)
    for words in (form.format(usage, reason) for form in (older, newer) for reason in (last, twice)):
        seen = overheard(words + FRAMES)
        assert usage in seen and words.splitlines()[-1] in seen and "\n" not in seen
        assert "c10::Error" not in seen and "raised from" not in seen


def overheard(words):
    """What a row keeps of an error with these words."""

    def fails():
        raise RuntimeError(words)

    (seen,) = capture_trouble(fails)[1]
    return seen


def test_a_long_error_keeps_its_beginning_and_its_end():
    seen = overheard("first\n" + "word " * 2000 + "\nlast")
    assert seen.startswith("first word") and seen.endswith("word last") and len(seen) < 1000


# ---- the class behind "nccl"

ASK = """
import torch
import torch.distributed as dist
from ddp_helpers.rank.doctor.checks import nccl_class
from ddp_helpers.rank.group import backend_class
print(nccl_class())
try:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    print(backend_class(torch.device("cuda")))  # torch 2.14's newer class asks for no GPU yet
except (RuntimeError, ValueError) as error:
    print(error)
"""


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_class_is_the_one_that_torch_makes(value):
    own = {name: word for name, word in NO_GPU.items() if name != "TORCH_DIST_USE_NCCL2"}
    done = python("-c", ASK, env=own | ({"TORCH_DIST_USE_NCCL2": value} if value else {}))
    named, said, *_ = done.stdout.splitlines()
    words = {
        "ProcessGroupNCCL2": ("nccl2 requires", "ProcessGroupNCCL2"),
        "ProcessGroupNCCL": ("ProcessGroupNCCL is only supported",),
    }
    assert said.startswith(words[named])


def test_the_row_names_the_class_and_ranks_that_take_another_are_red(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    first = lone(size=2)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert re.search(r"by ProcessGroupNCCL2? \(TORCH_DIST_USE_NCCL2: 0\)$", check_versions(first))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2")
    with pytest.raises(CheckFailed, match="not set"):
        check_versions(lone(1, 2, store=first.store))


# ---- MIG


def test_two_slices_of_a_card_are_two_gpus_and_one_slice_is_not():
    def task(name):
        return {"gpus": [("A", 8, 0)], "env": {"CUDA_VISIBLE_DEVICES": name}}

    assert seen_by("devices", task("MIG-1"), task("MIG-2"))[1:] == ("cuda:0", "")
    shared = seen_by("devices", task("MIG-1"), task("MIG-1"))
    assert "GPU A MIG-1 on here" in shared[1] and shared[2]
    assert seen_by("devices", task("0"), task("1"))[2], "a card's own number is not doubted"


@pytest.mark.parametrize(("version", "fine"), [((2, 29, 9), False), ((2, 30, 7), True)])
def test_ranks_share_a_gpu_where_nccl_can_and_was_told_so(version, fine, monkeypatch):
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)
    task = {"gpus": [("A", 8, 0)]}
    told = task | {"env": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}
    assert (seen_by("devices", told, told)[2] == "") is fine
    assert seen_by("devices", task, task)[2], "nobody said so"


# ---- recorders


def dumped(library, *names, group="0", pg=0, done=None):
    """What torch dumps of these calls."""
    entries = [
        {
            "profiling_name": f"{library}:{name}",
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "is_p2p": False,
        }
        | {"process_group": [group, ""], "pg_id": pg, "collective_seq_id": number}
        for number, name in enumerate(names, 1)
    ]
    status = {str(pg): {"last_completed_collective": str(len(names) if done is None else done)}}
    return {"pg_status": status, "entries": entries} if names else {"pg_status": {}}  # an empty one has no such key


@pytest.mark.parametrize("empty", [{"pg_status": {}}, {"pg_status": {}, "entries": []}])
def test_recorders_without_entries_are_not_taken_for_harmony(empty):
    lines = who_hangs.who_hangs({0: empty, 1: empty})
    assert [line.partition("'")[0] for line in lines] == ["rank 0", "rank 1"]
    assert all("TORCH_FR_BUFFER_SIZE" in line for line in lines)
    lines = who_hangs.who_hangs({0: empty | {"world_size": 2}})
    assert "rank 1 " in lines[0] and lines[1].startswith("rank 0'") and len(lines) == 2, lines


WATCHED = """
from torch._C import _distributed_c10d
_distributed_c10d._dump_nccl_trace_json = lambda *_: DUMP
"""


def test_what_nccls_recorder_has_is_in_the_file(tmp_path):
    (tmp_path / "train.py").write_text(WATCHED.replace("DUMP", repr(json.dumps(dumped("nccl", "all_reduce")))))
    assert python(watched.__file__, "train.py", cwd=tmp_path).returncode == 0
    dumps = who_hangs.read_dumps([tmp_path / "recorder_rank0.json"])
    assert [entry["profiling_name"] for entry in dumps[0]["entries"]] == ["nccl:all_reduce"]
    assert who_hangs.who_hangs(dumps) == [who_hangs.SAME]


def recorded(**dumps):
    """What watched.py writes, of a rank whose recorders have this."""

    def generic(collectives=None, active=None, backend="gloo"):
        return json.dumps(dumps.get(backend, dumped(backend)))

    older = json.dumps(dumps.get("nccl", dumped("nccl")))
    with (
        patch.object(c10d, "_dump_fr_trace_json", generic),
        patch.object(c10d, "_dump_nccl_trace_json", lambda *_: older, create=True),
    ):
        return watched.recorded()


@pytest.mark.parametrize("library", ["nccl", "nccl2"])
def test_each_class_of_nccl_is_asked_and_gloo_counts_for_itself(library):
    # A group "cpu:gloo,cuda:nccl": both count from 1. And NCCL numbers its groups otherwise than they are called.
    waits = recorded(gloo=dumped("gloo", "barrier"), **{library: dumped(library, "a", "b", pg=3, done=1)})
    lost = recorded(gloo=dumped("gloo", "barrier"), **{library: dumped(library, "a", pg=3)})
    (line,) = who_hangs.who_hangs({0: waits, 1: lost})
    assert line.startswith(f"group 0 of {library}, collective 2: rank 0 called b [4] Float; rank 1 "), line
    early = recorded(gloo=dumped("gloo", "barrier"))  # it hangs before its first one over NCCL
    assert "; rank 1 " in who_hangs.who_hangs({0: waits, 1: early})[0]
    (both,) = who_hangs.who_hangs({0: waits, 1: waits})
    assert "collective 2" in both and "; rank 1 " not in both, both
    assert who_hangs.who_hangs({0: lost, 1: lost}) == [who_hangs.SAME]


def test_the_newer_class_calls_its_recorder_so():
    header = TORCH / "include" / "torch" / "csrc" / "distributed" / "c10d" / "nccl2" / "ProcessGroupNCCL.hpp"
    if not header.exists():
        pytest.skip("torch before 2.14")
    assert 'kBackendName = "nccl2"' in header.read_text()


# ---- cards

TOTALS = {
    "T4": 14.56,
    "L40S": 44.42,
    "H100": 79.11,
}  # GiB of which torch told, in the threads that cards.py names


def prediction(need):
    """A prediction of which only DDP's peak counts."""
    return {"rows": [{"way": "DDP", "GPUs": 2, "peak": need}], "batch size": 1}


@pytest.mark.parametrize("card", cards.CARDS)
def test_what_fits_leaves_a_gigabyte_and_five_percent_on_every_card(card):
    sold, mib = cards.CARDS[card]
    total = TOTALS.get(card, (mib * 2**20 - cards.DRIVER) / 2**30) * 2**30
    for name in (card, str(sold)):
        most = max(
            need for need in range(10**9, 200 * 10**9, 10**8) if "DDP fits" in fits.finding(prediction(need), [name])
        )
        assert most + 1e9 + 0.05 * most <= total and most > 0.8 * total - 1e9


@pytest.mark.parametrize(
    ("need", "gpu", "answer"),
    [
        (2.2, "16", "DDP fits"),
        (14.8, "16", "too close to tell"),
        (15.9, "16", "more than 16 GB"),
        (23.95, "24", "more than 24 GB"),
        (22, "24", "too close to tell"),
        (75, "80", "DDP fits"),
        (84, "h100", "too close to tell"),
        (86, "H100", "more than type H100"),
    ],
)
def test_there_are_three_answers(need, gpu, answer):
    said = fits.finding(prediction(need * 1e9), [gpu])
    assert answer in said and "±" in said
    assert sum(word in said for word in ("DDP fits", "too close to tell", "more than")) == 1


def test_a_gpu_that_is_here_is_asked(monkeypatch):
    assert torch.cuda.is_available() or fits.this_machine(prediction(1e9)) == ""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (10e9, 40e9))
    answers = [fits.this_machine(prediction(need)).rpartition(": ")[2] for need in (8e9, 9e9, 41e9)]
    assert answers == ["fits", "too close to tell", "does not fit"]


@pytest.mark.parametrize("name", ["x", "0", "-16", "nan", "inf"])
def test_a_gpu_that_is_none_is_told_in_a_line(name):
    with pytest.raises(fits.FitsError, match=f"--gpu {name} "):
        fits.finding(prediction(1e9), [name])
