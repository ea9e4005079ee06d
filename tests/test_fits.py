"""The predictor of memory, held against what Linux says that a process took at most in real steps."""

import ctypes
import gc
import multiprocessing
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchvision
from real import THOROUGH
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import ROOT
from ddp_helpers.__main__ import main
from ddp_helpers.notebook import fits, memory
from ddp_helpers.rank.model import Net

PAGE = (ROOT / "docs" / "own.md").read_text()
LETTERS = fits.load(f"{ROOT / 'notebooks' / 'letters.py'}:Net")
WITHIN = 0.15  # beside other tests a process takes some MB more that are no tensors'


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
WITH_RANKS = ["a stack of linear layers", "letters.py"]  # the others are weekly
CASES = [(name, "alone") for name in (MODELS if THOROUGH else WITH_RANKS)]
CASES += [(name, way) for name in WITH_RANKS for way in ("DDP", "FSDP2")]


def bytes_of(name: str) -> int:
    """What Linux says of this process."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def train(name: str, way: str) -> int:
    """Take three steps; the most memory in the last two. For DDP and FSDP2 every rank must call it."""
    make, shape, dtype, batch_size = MODELS[name]
    model = make()
    if way == "DDP":
        model = DDP(model, gradient_as_bucket_view=True)
    elif way == "FSDP2":
        memory.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for again in range(3):
        optimizer.zero_grad()
        if again == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
        memory.loss_of(model(torch.zeros((batch_size, *shape), dtype=dtype))).backward()
        optimizer.step()
    return bytes_of("VmHWM")


def rank(number: int, meeting: Path, told: multiprocessing.SimpleQueue) -> None:
    """Measure each case; memory that is freed goes back to Linux at once."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 65536), libc.mallopt(-1, 65536)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    for case in CASES:
        if number == 0 or case[1] != "alone":
            train(*case)  # libraries are loaded, and their buffers are there
            gc.collect()
            libc.malloc_trim(0)  # else tensors are put into what is free and counted
            before = bytes_of("VmRSS")
            peak = train(*case) - before
            if number == 0:
                told.put((case, peak))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The peak in bytes of each case, on rank 0."""
    context = multiprocessing.get_context("fork")
    told, meeting = context.SimpleQueue(), tmp_path_factory.mktemp("fits") / "meeting"
    ranks = [context.Process(target=rank, args=(n, meeting, told)) for n in (0, 1)]
    for process in ranks:
        process.start()
    found, end = {}, time.monotonic() + 120
    try:
        while len(found) < len(CASES):
            assert time.monotonic() < end and not any(process.exitcode for process in ranks), "a rank failed, or hangs"
            found |= [told.get()] if not told.empty() else []
            time.sleep(0.01)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return found


def predicted(name: str, **options) -> dict[str, float]:
    """The peak in bytes of one and of two GPUs, by way."""
    make, shape, dtype, batch_size = MODELS[name]
    options = {"batch_size": batch_size} | options
    rows = fits.predict(make, shape, dtype, **options)["rows"]
    return {row["way"]: row["peak"] for row in rows if row["GPUs"] <= 2}


def off(measured: dict, **options) -> dict[tuple[str, str], tuple[float, float]]:
    """By case: the predicted peak in bytes, and by which share it is off the measured one."""
    foretold = {name: predicted(name, **options) for name in {name for name, _ in measured}}
    return {
        (name, way): (foretold[name][way], foretold[name][way] / size - 1) for (name, way), size in measured.items()
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process took at most")
def test_the_peak_is_what_real_steps_take_and_the_page_says_so(measured):
    found = off(measured)
    lines = [
        f"| {name} | {way} | {size / 1e6:.0f} | {found[name, way][0] / 1e6:.0f} | {found[name, way][1]:+.0%} |"
        for (name, way), size in measured.items()
    ]
    print("\n".join(lines))
    assert max(abs(share) for _, share in found.values()) < WITHIN, "\n".join(lines)
    page = {
        tuple(row[:2]): row[2:4] for row in (line.strip("| ").split(" | ") for line in PAGE.splitlines()) if row[3:]
    }
    for case, (size, _) in found.items():
        shown, foretold = map(int, page[case][:2])
        assert abs(shown / (measured[case] / 1e6) - 1) < WITHIN and abs(foretold - size / 1e6) < 1
    for name, wrong in (("letters.py", {"batch_size": 16}), ("a stack of linear layers", {"optimizer": "SGD"})):
        case = name, "alone"  # the control: another batch, another optimizer
        assert off({case: measured[case]}, **wrong)[case][1] < -2 * WITHIN


def test_by_hand_a_linear_layer():
    rows = fits.predict(lambda: nn.Linear(1024, 1024, bias=False), (1024,), batch_size=1, optimizer="Adam")["rows"]
    weights = 4 * 1024**2
    for row in rows:
        whole, cut = weights, weights / row["GPUs"]
        shares = {"alone": (whole, whole), "DDP": (whole, whole), "ZeRO": (whole, whole), "FSDP2": (cut, cut)}[
            row["way"]
        ]
        states = 2 * (cut if row["way"] == "FSDP2" else whole)  # ZeRO deals out whole tensors, and here is one
        assert (row["parameters"], row["gradients"]) == pytest.approx(shares, rel=1e-5)
        assert row["optimizer state"] == pytest.approx(states, abs=8)


def test_frozen_weights_have_no_gradient_and_no_state():
    def made():
        made.times += 1
        return nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.ModuleList([nn.Linear(1000, 10)])[0])

    made.times = 0
    [ddp] = [
        row for row in fits.predict(made, (1000,), batch_size=1)["rows"] if (row["way"], row["GPUs"]) == ("DDP", 2)
    ]
    assert ddp["gradients"] == pytest.approx(4 * 10_010, rel=0.01)
    assert ddp["optimizer state"] == pytest.approx(8 * 10_010, rel=0.01) and ddp["parameters"] > 4e6
    made.times = 0
    with pytest.raises(fits.FitsError, match="RuntimeError"):
        fits.predict(made, (5,), batch_size=1)
    assert made.times == 1  # a mistake never makes the real model


def test_lists_of_lists_are_cut_by_their_elements():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

        def forward(self, x):
            for layer in (layer for stage in self.stages for layer in stage):
                x = layer(x)
            return x

    assert "without memory" in fits.predict(Nested, (8,), batch_size=1)["how"]


MINE = """
from torch import nn
def two():
    return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(8)))
class Reads(nn.Linear):
    def __init__(self): super().__init__(4, 4)
    def forward(self, x): return super().forward(x) * x.sum().item()
wrong = 7
"""


def test_the_command_tells_what_fits(tmp_path, capsys):
    file = tmp_path / "my.py"
    file.write_text(MINE)
    assert main(["fits", f"{file}:two", "--input", "16384", "--batch-size", "1", "--gpu", "24"]) == 0
    *_, told, last = capsys.readouterr().out.splitlines()
    assert "without memory" in told and "DDP needs 42.9 GB" in last and last.endswith("ZeRO fits 24 GB from 4 GPUs on")
    assert main(["fits", f"{file}:Reads", "--input", "4", "--gpu", "24"]) == 0  # needs values: a real step
    *_, told, last = capsys.readouterr().out.splitlines()
    assert "in real steps on the CPU" in told and "my.py:7: DataDependent" in told
    assert last.startswith("DDP fits a GPU of 24 GB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["my.py:two", "--input", "5"], "a step on an input of (32, 5), torch.float32"),
        (["my.py:eight", "--input", "5"], "no class and no function 'eight'"),
        (["my.py:wrong", "--input", "5"], "no class and no function 'wrong'"),
        (["other.py:two", "--input", "5"], "is not FILE.py:NAME"),
        (["my.py", "--input", "5"], "is not FILE.py:NAME"),
        (["my.py:two", "--input", "5", "--batch-size", "0"], "every number must be 1 or more"),
        (["my.py:two", "--input", "5", "--optimizer", "Best"], "'Best' is none of torch.optim's"),
        (["bad.py:two", "--input", "5"], "bad.py cannot be imported: bad.py:1: ZeroDivisionError"),
    ],
)
def test_a_mistake_is_told_in_a_line(words, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "my.py").write_text(MINE.replace("16384", "16").replace("range(8)", "range(2)"))
    (tmp_path / "bad.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["fits", *words])
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
