"""The predictor of memory, held against what tensors, and PyTorch's allocator, took at most in real steps."""

import copy
import json
import multiprocessing
import os
from collections.abc import Iterator
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torchvision
from real import THOROUGH, until
from torch import UntypedStorage, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.rank.scripts.mnist_ddp import Net
from ddp_tools import PlainError, changes, fits, memory, model_file
from ddp_tools.cards import DRIVER, gpus_named

LETTERS = model_file.load(f"{ROOT / 'notebooks' / 'letters.py'}:Net")
WITHIN = 0.05  # some kernels take memory for themselves, and free it


def mlp() -> nn.Module:
    """Four hidden layers, most of whose memory is weights."""
    hidden = [layer for _ in range(3) for layer in (nn.ReLU(), nn.Linear(1024, 1024))]
    return nn.Sequential(nn.Linear(784, 1024), *hidden, nn.ReLU(), nn.Linear(1024, 10))


MODELS = {
    "the MNIST Net": (Net, (1, 28, 28), torch.float32, 128),
    "a stack of linear layers": (mlp, (784,), torch.float32, 512),
    "letters.py": (LETTERS, (64,), torch.int64, 32),
    "letters.py, width 256": (partial(LETTERS, width=256), (64,), torch.int64, 16),
    "torchvision's resnet18": (torchvision.models.resnet18, (3, 128, 128), torch.float32, 4),
}
RECOMPUTED = "letters.py, its blocks checkpointed"
MODELS[RECOMPUTED] = MODELS["letters.py, width 256"]
WITH_RANKS = ["a stack of linear layers", "letters.py"]  # the others are weekly
CASES = [(name, "alone") for name in (MODELS if THOROUGH else [*WITH_RANKS, RECOMPUTED])]
CASES += [(name, way) for name in WITH_RANKS for way in ("DDP", "FSDP2")]


def steps(name: str, way: str) -> Iterator[None]:
    """Take three steps, with a pause after the first: all that stays is there. Of DDP and FSDP2 every rank calls it."""
    make, shape, dtype, each = MODELS[name]
    model = memory.checkpoint_units(make()) if name == RECOMPUTED else make()
    if way == "DDP":
        model = DDP(model, gradient_as_bucket_view=True)
    elif way == "FSDP2":
        memory.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for again in range(3):
        optimizer.zero_grad()
        memory.loss_of(model(torch.zeros((each, *shape), dtype=dtype))).backward()
        optimizer.step()
        if again == 0:
            yield


def by_tensors(name: str, way: str) -> int:
    """The most bytes behind tensors at a time, counted as the predictor does, but of real ones."""
    resize = UntypedStorage.resize_

    def counted(storage: UntypedStorage, size: int) -> None:  # FSDP2 frees and takes memory so
        resize(storage, size)
        live.count(storage)

    with patch.object(UntypedStorage, "resize_", counted), memory.LiveMemory() as live:
        taken = steps(name, way)
        next(taken)
        live.most = live.now
        next(taken, None)
    return live.most


def by_allocator(name: str) -> int:
    """The most bytes that PyTorch's allocator had handed out at a time, as it tells the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        taken = steps(name, "alone")
        next(taken)
        with record_function("the last two"):
            next(taken, None)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() if event.name() == "[memory]" else 0 for event in events]
    begin = [event.name() for event in events].index("the last two")
    return max(list(accumulate(sizes))[begin:])


def rank(number: int, meeting: Path, told: multiprocessing.SimpleQueue) -> None:
    """Count each case in each way; rank 0 tells."""
    os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler says nothing of its own
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    for name, way in CASES:
        if number == 0 or way != "alone":
            peaks = [by_tensors(name, way)]
            peaks += [by_allocator(name)] if way == "alone" else []  # gloo's threads tell it nothing
            if number == 0:
                told.put(((name, way), peaks))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The most bytes at a time of each case, on rank 0: those of tensors; alone, those of the allocator, too."""
    context = multiprocessing.get_context("fork")
    told, meeting = context.SimpleQueue(), tmp_path_factory.mktemp("fits") / "meeting"
    ranks = [context.Process(target=rank, args=(n, meeting, told)) for n in (0, 1)]
    for process in ranks:
        process.start()
    peaks = {}

    def next_case() -> bool:
        assert not any(process.exitcode for process in ranks), "a rank failed"
        peaks.update([told.get()] if not told.empty() else [])
        return len(peaks) == len(CASES)

    try:
        until(next_case, "the ranks have taken their steps")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return peaks


@cache
def predicted(name: str, **options) -> dict[str, float]:
    """The peak in bytes of one and of two GPUs, by way."""
    make, shape, dtype, each = MODELS[name]
    options = {"batch_size_per_rank": each, "recompute": name == RECOMPUTED} | options
    rows = fits.predict(make, shape, dtype, **options)["rows"]
    return {row["way"]: row["peak"] for row in rows if row["GPUs"] <= 2}


def off(size: float, *counted: int) -> float:
    """By which share a size is off those that were counted, at most."""
    return max((size / one - 1 for one in counted), key=abs)


def test_the_peak_is_what_real_steps_take(measured):
    for (name, way), counted in measured.items():
        size = predicted(name)[way]
        assert abs(off(size, *counted)) < WITHIN, f"{name}, {way}: {counted} bytes were counted, predicted {size:.0f}"
    mistakes = {"letters.py": {"batch_size_per_rank": 16}, "a stack of linear layers": {"optimizer": "SGD"}}
    for name, wrong in mistakes.items():
        size = predicted(name, **wrong)["alone"]  # the control: another batch, another optimizer
        assert off(size, *measured[name, "alone"]) < -2 * WITHIN


def test_by_hand_a_linear_layer():
    given = {"batch_size_per_rank": 1, "optimizer": "Adam"}
    rows = fits.predict(lambda: nn.Linear(1024, 1024, bias=False), (1024,), **given)["rows"]
    weights = 4 * 1024**2
    for row in rows:
        whole, cut = weights, weights / row["GPUs"]
        share = cut if row["way"] == "FSDP2" else whole  # ZeRO deals out whole tensors, and here is one
        assert (row["parameters"], row["gradients"]) == pytest.approx((share, share), rel=1e-5)
        assert row["optimizer state"] == pytest.approx(2 * share, abs=8)


def test_frozen_weights_have_no_gradient_and_no_state():
    def made():
        made.times += 1
        return nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.ModuleList([nn.Linear(1000, 10)])[0])

    made.times = 0
    rows = fits.predict(made, (1000,), batch_size_per_rank=1)["rows"]
    [ddp] = [row for row in rows if (row["way"], row["GPUs"]) == ("DDP", 2)]
    assert ddp["gradients"] == pytest.approx(4 * 10_010, rel=0.01)
    assert ddp["optimizer state"] == pytest.approx(8 * 10_010, rel=0.01) and ddp["parameters"] > 4e6
    made.times = 0
    with pytest.raises(PlainError, match="RuntimeError"):
        fits.predict(made, (5,), batch_size_per_rank=1)
    assert made.times == 1  # a mistake never makes the real model


MINE = """
from torch import UntypedStorage, nn
def two():
    return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(8)))
class Reads(nn.Linear):
    def __init__(self): super().__init__(4, 4)
    def forward(self, x): return super().forward(x) * x.sum().item()
"""


def test_the_command_tells_what_fits_and_what_would(tmp_path, capsys):
    (file := tmp_path / "my.py").write_text(MINE)
    words = ["--input", "16384", "--batch-size-per-rank", "1", "--json", str(tmp_path / "a.json")]
    told = {}
    for gpu, status, would_fit in (("24", 0, "FSDP2"), ("80", 0, None), ("3", 1, None)):
        assert main(["fits", f"{file}:two", *words, "--gpu", gpu]) == status
        answer = json.loads((tmp_path / "a.json").read_text())["would fit"]
        told[gpu] = capsys.readouterr().out.splitlines()
        assert (answer and answer["way"]) == would_fit
        assert ("to make it fit" in "\n".join(told[gpu])) == bool(would_fit)
    *table, how, last, cure = told["24"]
    assert "without memory" in how and "DDP needs 42.9 GB" in last
    assert any(line.split()[:2] == ["ZeRO", "8"] and line.endswith("24 GB") for line in table)
    assert cure.startswith("to make it fit 24 GB, 13.4 GB: FSDP2 over 4 GPUs: fully_shard(block)")
    assert "no change makes it surely fit 3 GB" in told["3"][-1]


def test_a_size_as_sold_is_the_smallest_card_of_that_size():
    for name, mib in {"16": 15_360, "24": 23_028, "80": 81_559, "T4": 15_360, "A100-80": 81_920}.items():
        [gpu] = gpus_named([name])
        assert gpu.most == mib * 2**20 - DRIVER and gpu.sure < gpu.most, name


def test_a_model_that_needs_values_takes_a_real_step(tmp_path, capsys):
    (file := tmp_path / "my.py").write_text(MINE)
    assert main(["fits", f"{file}:Reads", "--input", "4", "--gpu", "24"]) == 0
    *_, how, last = capsys.readouterr().out.splitlines()
    assert "CPU" in how and "my.py:7: DataDependent" in how
    assert last.startswith("DDP fits ") and "24 GB" in last


def blocks(width: int, depth: int = 8) -> nn.Module:
    """A model of blocks, each of which is wide inside."""
    inside = (nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    return nn.Sequential(*(nn.Sequential(*copy.deepcopy(inside)) for _ in range(depth)))


def first_change(weights: float, sample: float, batch_size: int, bf16: bool = False, gpu: str = "16"):
    """What makes training fit, with so many GB of weights with all their state, and of activations of a sample."""
    told: list[tuple[int, bool, bool]] = []

    def predict_with(batch: int, bf16: bool, recompute: bool) -> fits.Prediction:
        told.append((batch, bf16, recompute))
        if batch == 1 and sample == 7:
            raise PlainError("Expected more than 1 value per channel")
        saved = batch * sample * (0.6 if bf16 else 1) * (0.5 if recompute else 1)
        rows = []
        for way, gpus in (("DDP", 2), ("FSDP2", 2), ("FSDP2", 4), ("FSDP2", 8)):
            kept = weights * 1e9 / (gpus if way == "FSDP2" else 1)
            kinds = dict.fromkeys(fits.KINDS[:3], kept / 3) | {"activations": saved * 1e9}
            rows.append({"way": way, "GPUs": gpus, "peak": kept + saved * 1e9} | kinds)
        return {"rows": rows, "how": "", "batch size": batch, "buffers": 0.0, "loss": ""}

    asked = predict_with(batch_size, bf16, recompute=False)
    told.clear()
    return *changes.what_would_fit(predict_with, asked, bf16, ["3", gpu]), told


def test_what_makes_it_fit_is_the_first_change_that_does():
    asked = changes.Change(1, 1, bf16=False, recompute=False, way="DDP", GPUs=2)  # of 16 GB, 13.6 can be had
    assert first_change(6, 6, 1) == (None, "", [])  # it fits as it is
    change, line, told = first_change(4, 1, 24)
    assert change == asked._replace(batch_size=6, pieces=4) and told == [(12, False, False), (6, False, False)]
    assert "--batch-size-per-rank 6, of which 4 micro-batches make 24" in line and "(loss / 4).backward()" in line
    assert first_change(4, 2, 9)[0] == asked._replace(pieces=9)  # nine are not halved
    change, line, _ = first_change(4, 12, 1)
    assert change == asked._replace(bf16=True) and line.startswith("to make it fit 16 GB") and "autocast(" in line
    for bf16 in (False, True):  # where bf16 is asked for, it is no cure
        change, line, _ = first_change(4, 18 if not bf16 else 30, 1, bf16)
        assert change == asked._replace(recompute=True, bf16=bf16) and "use_reentrant=False" in line
    change, line, told = first_change(20, 5, 1)  # weights alone are too much for DDP: nothing of it is counted
    assert change == asked._replace(way="FSDP2", GPUs=4) and "over 4 GPUs" in line and not told
    change, line, _ = first_change(1, 70, 3)
    assert change is None and line.startswith("no change makes it surely fit 16 GB")
    change, line, _ = first_change(40, 20, 4)
    assert change == changes.Change(1, 4, bf16=True, recompute=True, way="FSDP2", GPUs=8)
    assert all(word in line for word in ("--batch-size-per-rank 1", "MixedPrecision", "checkpoint(", "over 8 GPUs"))
    # Gradients that wait for the next piece are there besides, on each GPU: 40 / 3 / 8 GB.
    assert "12.7 GB" in line
    change, _, told = first_change(9, 7, 4)  # two samples are too many, one is too few for BatchNorm
    assert (1, False, False) in told and change and change.batch_size > 1 and change.recompute


def test_the_softmax_of_autocast_is_in_float32_as_on_gpus():
    class Attends(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return torch.softmax(x @ x.transpose(1, 2), -1) @ x

    def activations(bf16: bool) -> float:
        return fits.predict(lambda: Attends(8, 8), (512, 8), batch_size_per_rank=8, bf16=bf16)["rows"][0]["activations"]

    table = 8 * 512 * 512  # numbers
    assert activations(bf16=False) == pytest.approx(4 * table, rel=0.1)
    assert activations(bf16=True) == pytest.approx(4 * table + 2 * table, rel=0.1)  # its result, and that as bf16


def test_what_ddp_holds_twice_without_a_view_is_said_where_it_counts():
    prediction = fits.predict(partial(blocks, 2048), (2048,), batch_size_per_rank=1, optimizer="SGD")
    assert "without it, 1.07 GB more" in fits.finding(prediction, ["5"])
    assert "gradient_as_bucket_view" not in fits.finding(prediction, ["16"])
