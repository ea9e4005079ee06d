"""docs/own.md's lines, pasted into a script of one's own: a record, early stopping, the best weights."""

import os
import re
import shutil
import textwrap

import pytest
import torch
from real import LIMIT, python, weekly, without_helpers

from ddp_helpers import ROOT
from ddp_helpers.records import runs, scaling
from ddp_tools.audit.command import audit
from ddp_tools.audit.notes import OK, RED

PAGE = (ROOT / "docs" / "own.md").read_text()
TASK, *FENCES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
FENCES = [textwrap.indent(text, "    ") for text in FENCES]
[COPIED] = re.findall(r"from ddp_helpers.rank.record import ([^`]+)`", PAGE)
RECORD = ROOT / "ddp_helpers" / "rank" / "record.py"
# A regression on two or more ranks. The last points to test are hard: ranks that look at their own share disagree.
SCRIPT = """
import argparse, os, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from record import {copied}

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir", type=Path, default=Path("record"))
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--patience", type=int, default=99)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--per-rank", action="store_true")
parser.add_argument("--turn", type=int, default=99)


def points(count, seed):
    numbers = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=numbers)
    return inputs, inputs.sum(1, keepdim=True)


def train_epoch(model, batches, optimizer, schedule):
    begin, trained = time.perf_counter(), {"samples": 0}
    for inputs, target in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), target).backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        trained["samples"] += len(inputs) * world_size
    print(f"rate {rate}\\n", end="", flush=True)  # in one piece, between other ranks' lines
    return time.perf_counter() - begin, trained


def test(model, batches):
    global tests
    tests += 1
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, target in batches:
            worse = 10.0 * max(0, tests - args.turn) * (rank + 1)  # from this test on, most of all on the last rank
            sums += torch.stack([((model(inputs) - target) ** 2).sum() + worse, torch.tensor(float(len(inputs)))])
    return sums


def record(args, epoch, trained, tested, seconds):
{line}

def train(args, device):
    inputs, target = points(30, 2)
    sampler = DistributedSampler(train_set)
    batch_size = args.batch_size if args.per_rank else args.batch_size // world_size
    train_batches = DataLoader(train_set, batch_size, sampler=sampler)
    test_batches = DataLoader(TensorDataset(inputs[rank::world_size], target[rank::world_size]), 8)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{loop}

def main():
{around}

args, tests, train_set = parser.parse_args(), 0, TensorDataset(*points(64, 1))
device = torch.device("cpu")
rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def own(tmp_path):
    """Write the script that has what the page says, with these changes, and give its path."""

    def write(*changes):
        around, line, loop = FENCES
        text = (
            SCRIPT.replace("{copied}", COPIED)
            .replace("{line}", line)
            .replace("{loop}", loop)
            .replace("{around}", around)
        )
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "own.py").write_text(text)
        shutil.copy(RECORD, tmp_path)
        return tmp_path / "own.py"

    return write


def start(script, *words, ranks=2):
    """Start the script under torchrun, where it cannot import the helpers."""
    env = os.environ | without_helpers(script.parent)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script.name, *words]
    return python(*command, cwd=script.parent, env=env)


def rates(done):
    """The learning rate at the end of each epoch, of the first rank to say it."""
    return [float(rate) for rate in re.findall(r"rate (\S+)", done.stdout)]


def test_what_the_page_names_writes_a_record_of_any_script_and_its_metrics(own):
    script = own(('"loss": sums[0].item(),', '"loss": sums[0].item(), "hardest": 2 * sums[0].item(),'))
    done = start(script)
    assert done.returncode == 0, done.stderr[-3000:]
    run, table = runs.read_run(script.parent / "record"), runs.table(script.parent / "record")
    row = table.iloc[-1]
    assert not run.problems and row["state"] == "done" and len(table) == 6
    assert (row["world_size"], row["nodes"], row["batch_per_rank"], row["global_batch"]) == (2, 1, 8, 16)
    assert scaling.metrics(table) == ["test_loss", "test_hardest"] and row["test_loss"] < table.iloc[0]["test_loss"]
    assert rates(done)[-1] < 1e-4, "the schedule has come down"


def test_a_run_that_fails_is_recorded_as_such(own):
    script = own(("    train(args, device)", "    raise ValueError(5)"))
    assert start(script, ranks=1).returncode
    run = runs.read_run(script.parent / "record")
    assert (run.state, run.status["why"]) == ("failed", "ValueError(5)")


def test_all_ranks_stop_early_together_and_the_best_weights_are_kept(own):
    script = own()
    done = start(script, "--epochs", "9", "--patience", "2", "--turn", "3", ranks=3)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [epoch["test_loss"] for epoch in runs.read_run(script.parent / "record").epochs]
    assert len(losses) == 5 and min(losses) == losses[2], "two epochs without progress after the third"
    assert len(rates(done)) == 5 * 3, "each rank has trained for as many epochs"
    saved, shorter = torch.load(script.parent / "best.pt", weights_only=True), losses[2]
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(2))
    loss = ((inputs @ saved["weight"].T + saved["bias"] - inputs.sum(1, keepdim=True)) ** 2).mean().item()
    assert loss == pytest.approx(shorter, rel=1e-4), "the file holds the weights of the best epoch"


@weekly
def test_control_a_schedule_with_one_device_s_total_does_not_come_down(own):
    right = start(own(), "--per-rank")
    wrong = start(own(("args.epochs * len(train_batches)", "args.epochs * 64 // args.batch_size")), "--per-rank")
    assert right.returncode == wrong.returncode == 0
    assert rates(right)[-1] < 1e-4 < 1e-2 < rates(wrong)[-1]


@pytest.mark.parametrize("who", ["all ranks", "each rank alone"])
def test_the_audit_sees_a_rank_that_decides_alone(who, own, tmp_path):
    alone = [("if without_progress == args.patience:", "if rank == 0 and without_progress == args.patience:")]
    script = own(*alone * (who != "all ranks"))
    words = ["--epochs", "9", "--patience", "2", "--turn", "3"]
    rows = {
        row.name: row.verdict
        for row in audit(script, words, tmp_path / "audit", limit=LIMIT if who == "all ranks" else 60)
    }
    expected = OK if who == "all ranks" else RED
    assert rows["end"] == rows["collectives"] == expected, rows


def test_the_pages_task_trains_in_the_script_on_two_ranks(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    assert python("task.py", cwd=tmp_path).returncode == 0
    done = start(tmp_path / "my_ddp.py", "--epochs", "5", "--lr", "0.01", "--run-dir", "record")
    assert done.returncode == 0, done.stderr[-3000:]
    table = runs.table(tmp_path / "record")
    assert scaling.metrics(table) == ["test_loss", "test_off"] and table.iloc[-1]["test_loss"] < 0.1
