"""The reader of traces: two real ranks under torch.profiler, one of them late; a GPU, two clocks, missing files."""

import json
import time

import pytest
import torch
import torch._inductor.config  # here, once: the profiler imports it in each process
import torch.distributed as dist
from real import LIMIT
from torch.profiler import profile, record_function, schedule

from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.find_the_lost_time import trace

READS, LATE, STEPS = 0.03, 0.5, 3  # seconds that both read, and that a rank comes after the other


def late_rank(folder, name, late):
    """Four steps, the last three recorded: read, compute, and an all-reduce that one rank comes to after the other."""
    gradient, matrix = torch.ones(1000), torch.randn(400, 400)
    with profile(schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1)) as prof:
        for step in range(1 + STEPS):
            with record_function("data"):
                time.sleep(READS)
            matrix @ matrix
            waits = folder / f"{name}_step{step}"
            if dist.get_rank() == late:
                while not waits.exists():
                    time.sleep(0.001)
                time.sleep(LATE)
            sent = dist.all_reduce(gradient, async_op=True)
            if dist.get_rank() != late:
                waits.touch()
            sent.wait()
            prof.step()
    prof.export_chrome_trace(f"{folder}/{name}_rank{dist.get_rank()}.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Traces of two runs of two real ranks: rank 1 late, and the control, rank 0 late."""
    folder = tmp_path_factory.mktemp("traces")
    on_ranks(2, lambda: [late_rank(folder, name, late) for name, late in (("late", 1), ("turned", 0))], patience=LIMIT)
    return folder


def test_the_wait_is_found_on_the_rank_that_is_not_late(folder):
    table, control = (trace.account(trace.read_traces(folder, name)) for name in ("late", "turned"))
    # The one waits as long as the other sleeps, which has no one to wait for.
    assert table["late"][0] > 500 * LATE and table["late"][0] > table["late"][1]
    assert control["late"][1] > 500 * LATE and control["late"][1] > control["late"][0]
    assert table["data"].min() >= 1000 * READS and table["compute"].min() > 0
    parts = table[["data", "compute", "exposed", "late", "other"]]
    assert torch.allclose(torch.tensor(parts.sum(axis=1)), torch.tensor(table["step"]))
    assert parts.min(axis=None) > -0.01  # to which times are rounded


def test_clocks_of_two_nodes_are_laid_on_each_other(folder, tmp_path):
    for rank in (0, 1):
        written = json.loads((folder / f"late_rank{rank}.json").read_text())
        for event in written["traceEvents"]:
            if "ts" in event:
                event["ts"] -= 3e9 * rank  # 50 minutes
        (tmp_path / f"late_rank{rank}.json").write_text(json.dumps(written))
    moved, true = (trace.read_traces(where, "late") for where in (tmp_path, folder))
    off = trace.account(moved) - trace.account(true)
    assert off.abs().max(axis=None) < 0.1  # ms


def test_the_figure_tells_the_loss_before_and_after(folder):
    late, turned = (trace.read_traces(folder, name) for name in ("late", "turned"))
    picture = trace.draw_lanes(late, turned, "late", "two ranks")
    picture.figure.draw_without_rendering()
    ms = trace.account(late)["late"][0]
    assert picture.figure.get_suptitle().startswith("Rank 0 ") and f" {ms:.0f} of " in picture.figure.get_suptitle()
    assert [ax.get_title(loc="left") for ax in picture.figure.axes] == ["before", "after"]


def gpu(*kernels):
    """A trace as a GPU writes it, in microseconds: a step of 100 ms, 20 of them in "data", and these kernels."""
    events = [("user_annotation", "ProfilerStep#5", 0, 100_000), ("user_annotation", "data", 0, 20_000)]
    events += [("gpu_user_annotation", "data", 0, 90_000), ("cpu_op", "aten::mm", 20_000, 80_000)]
    events += [("kernel", *kernel) for kernel in kernels]
    keys = ("cat", "name", "ts", "dur")
    return json.dumps({"traceEvents": [{"ph": "X"} | dict(zip(keys, event, strict=True)) for event in events]})


def test_on_a_gpu_kernels_count_and_nccl_is_the_all_reduce(tmp_path):
    kernels = [("gemm", 10_000, 50_000), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50_000, 30_000)]
    (tmp_path / "gpu_rank0.json").write_text(gpu(*kernels))
    table = trace.account(trace.read_traces(tmp_path, "gpu")).loc[0]
    assert table.to_dict() == pytest.approx({
        "step": 100, "data": 10, "compute": 50, "exposed": 20, "late": 0, "other": 20, "hidden": 10
    })  # fmt: skip


def test_without_a_recorded_all_reduce_no_number_of_it_is_told(folder, tmp_path, capsys):
    for rank in range(2):  # as on simulated GPUs
        alone = json.loads(gpu()) | {"distributedInfo": {"world_size": 2}}
        (tmp_path / f"gpu_rank{rank}.json").write_text(json.dumps(alone))
    traces = trace.read_traces(tmp_path, "gpu")
    assert capsys.readouterr().out.startswith("gpu: no all-reduce was recorded, so `compute` includes its time: ")
    titles = [trace.draw_lanes(traces, traces, loss).figure.get_suptitle() for loss in ("data", "late", "exposed")]
    assert [title[:9] for title in titles] == ["Rank 0 wa", "No all-re", "No all-re"]
    late = trace.read_traces(folder, "late")
    assert "No all-reduce" not in trace.draw_lanes(late, traces, "late").figure.get_suptitle() + capsys.readouterr().out


def test_without_a_range_called_data_one_line_says_so(folder, tmp_path, capsys):
    trace.read_traces(folder, "late")
    assert capsys.readouterr().out == "", "the control"
    for rank in range(2):
        text = (folder / f"late_rank{rank}.json").read_text()
        (tmp_path / f"late_rank{rank}.json").write_text(text.replace('"name": "data"', '"name": "load"'))
    table = trace.account(trace.read_traces(tmp_path, "late"))
    said = capsys.readouterr().out
    assert said.startswith("late: no range is called data, so `other` includes its time: ") and said.count("\n") == 1
    assert (table["data"] == 0).all() and table["other"].min() >= 1000 * READS


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (lambda text: {}, "late_rank0.json"),
        (lambda text: {"late_rank0.json": text}, "late_rank1.json"),
        (lambda text: {"late_rank0.json": '{"traceEvents": []}'}, "late_rank0.json has no step: "),
        (
            lambda text: {"late_rank0.json": text, "late_rank1.json": gpu()},
            r"late: ranks recorded \[3, 0\] collectives",
        ),
    ],
)
def test_what_is_not_a_run_s_traces_is_said_in_one_line(folder, tmp_path, files, told):
    for name, text in files((folder / "late_rank0.json").read_text()).items():
        (tmp_path / name).write_text(text)
    with pytest.raises((FileNotFoundError, ValueError), match=told) as error:
        trace.read_traces(tmp_path, "late")
    assert "\n" not in str(error.value)
