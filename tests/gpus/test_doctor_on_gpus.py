"""What the doctor, the recorders of a hang and `fits` say on GPUs: tested with the installed libraries, without one."""

import json
from argparse import Namespace
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch
from doctor_table import red, seen_by
from faults.ranks import run
from torch._C import _distributed_c10d as c10d

from ddp_helpers.rank.doctor.case import Case, capture
from ddp_helpers.rank.doctor.checks import make_plan
from ddp_helpers.rank.doctor.reduce import find_sum
from ddp_tools import PlainError, cards, fits, watched, who_hangs

TORCH = Path(torch.__file__).parent


def lone(rank=0, size=1):
    """A rank under examination, whose patience is over."""
    return Case("torchrun", rank, rank, size, Namespace(timeout=-5, no_cuda=False, run_dir=Path("/nowhere")))


# ---- an init that blocks

BLOCKED = """
import time
import torch.distributed as dist
from ddp_helpers.rank.scripts import doctor

dist.init_process_group = lambda *_, **__: time.sleep(9999)
doctor.main()
"""


def test_an_init_that_blocks_is_red_and_the_doctor_does_not_wait_for_it(tmp_path):
    (tmp_path / "blocked.py").write_text(BLOCKED)
    flags = ["--data", "none", "--run-dir", tmp_path, "--timeout", 3]
    ended = run(tmp_path / "blocked.py", *flags, folder=tmp_path / "ranks", env={"GLOO_SOCKET_IFNAME": ""})
    assert ended.statuses == [1, 1]
    red_rows = red("\n".join(line for line in ended.said[0].splitlines() if line and line[:6] != "left: "))
    assert list(red_rows) == ["all-reduce"]
    seen, cure = red_rows["all-reduce"]
    assert "no answer" in seen and "GLOO_SOCKET_IFNAME is not set, and there are lo" in seen
    assert "the interface between the nodes" in cure


@pytest.mark.parametrize("value", ["", "eth7"])
def test_where_nccl_blocks_its_interface_is_named(value, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    never = Event()
    monkeypatch.setattr("torch.cuda.set_device", lambda _: never.wait())  # the GPU that is not here
    case = lone()
    case.device, case.plan = "cuda:0", {"on GPUs": True}
    _, seen = capture(lambda: find_sum(case))
    assert f"NCCL_SOCKET_IFNAME is {value or 'not set'}, and there are lo, ib0" in seen and case.blocked


# ---- MIG


def task(name, gpu="A"):
    """A task that is shown this GPU, of which this name was given."""
    return {"gpus": gpu, "env": {"CUDA_VISIBLE_DEVICES": name}}


def test_two_slices_of_a_card_are_two_gpus_and_one_slice_is_not():
    assert seen_by("devices", task("MIG-1"), task("MIG-2"))[1:] == ("cuda:0", "")
    _, seen, cure = seen_by("devices", task("MIG-1"), task("MIG-1"))
    assert "GPU A MIG-1 on here is shared" in seen and "with MIG one slice per rank" in cure
    # --gres=gpu:3g.40gb:2 names two to both tasks, and CUDA shows the first to each.
    assert "is shared" in seen_by("devices", task("MIG-1,MIG-2"), task("MIG-1,MIG-2"))[1]
    assert seen_by("devices", task("0"), task("1"))[2], "a card's own number is not doubted"


def test_ranks_share_a_gpu_where_nccl_was_told_so(monkeypatch):
    assert seen_by("devices", task("0"), task("0"))[2], "nobody said so"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert seen_by("devices", task("0"), task("0"))[2] == ""


@pytest.mark.parametrize(
    ("gpus", "told", "on_gpus"),
    [("AB", "", True), ("AA", "", False), ("AA", "1", True), (["A", ""], "", False), (["", ""], "", False)],
)
def test_nccl_is_tried_only_where_each_rank_has_a_gpu_that_it_may_use(gpus, told, on_gpus, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
    monkeypatch.setattr("pathlib.Path.touch", lambda *_, **__: None)
    found = {rank: {"devices": [[gpu, "cuda:0"], ""]} for rank, gpu in enumerate(gpus)}
    assert make_plan(lone(size=2), found)["on GPUs"] is on_gpus
    found[1] = {"devices": [None, "local rank 1 has no GPU"]}
    assert make_plan(lone(size=2), found)["on GPUs"] is False


# ---- recorders


def dumped(library, *names, group="0", pg=0, done=None):
    """What torch dumps of these calls."""
    same = {"input_sizes": [[4]], "input_dtypes": ["Float"], "is_p2p": False, "process_group": [group, ""], "pg_id": pg}
    entries = [
        same | {"profiling_name": f"{library}:{name}", "collective_seq_id": number}
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

# GiB of which torch told, in the threads that cards.py names.
TOTALS = {"T4": 14.56, "L40S": 44.42, "H100": 79.11}


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
    with pytest.raises(PlainError, match=f"--gpu {name} "):
        fits.finding(prediction(1e9), [name])
