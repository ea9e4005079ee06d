"""docs/own.md's lines, pasted into a script of one's own: a record, early stopping, the best weights."""

import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from changed_text import replaced
from real import python, without_helpers

from ddp_helpers import ROOT
from ddp_helpers.launch.forked_script import ForkedScript, wait_for_runs
from ddp_helpers.records import runs, scaling

PAGE = (ROOT / "docs" / "own.md").read_text()
TASK, *FENCES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
FENCES = [textwrap.indent(text, "    ") for text in FENCES]
[COPIED] = re.findall(r"from ddp_helpers.rank.record import ([^`]+)`", PAGE)
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
    batch_size = args.batch_size // world_size
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


def own(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the script that has what the page says, with these changes, into a new folder, and give its path."""
    around, line, loop = FENCES
    text = SCRIPT.replace("{copied}", COPIED).replace("{line}", line).replace("{loop}", loop)
    folder.mkdir()
    (folder / "own.py").write_text(replaced(text.replace("{around}", around), changes))
    shutil.copy(ROOT / "ddp_helpers" / "rank" / "record.py", folder)
    return folder / "own.py"


def train(*scripts: Path, words: tuple = (), ranks: int = 2) -> list[ForkedScript]:
    """Run scripts at once, each beside itself, to their end."""
    started = [ForkedScript(script, *words, ranks=ranks, folder=script.parent) for script in scripts]
    wait_for_runs(*started)
    return started


def said(run: ForkedScript) -> list[str]:
    """What each rank printed."""
    return ["\n".join(run.lines_of_rank(rank)) for rank in range(len(run.exit_statuses))]


def rates(text: str) -> list[float]:
    """The learning rate at the end of each epoch of a rank."""
    return [float(rate) for rate in re.findall(r"rate (\S+)", text)]


def test_what_the_page_names_writes_a_record_of_any_script_and_its_metrics(tmp_path):
    """Its schedule comes down; one with the steps of one device, which are twice as many, does not."""
    loss, steps = '"loss": sums[0].item(),', "steps = args.epochs * len(train_batches)"
    script = own(tmp_path / "right", (loss, f'{loss} "hardest": 2 * sums[0].item(),'))
    right, wrong = train(script, own(tmp_path / "wrong", (steps, steps.replace("args", "2 * args", 1))))
    assert right.exit_statuses == wrong.exit_statuses == [0, 0], said(right) + said(wrong)
    run, table = runs.read_run(script.parent / "record"), runs.table(script.parent / "record")
    row = table.iloc[-1]
    assert not run.problems and row["state"] == "done" and len(table) == 6
    assert (row["world_size"], row["nodes"], row["batch_per_rank"], row["global_batch"]) == (2, 1, 8, 16)
    assert scaling.metrics(table) == ["test_loss", "test_hardest"] and row["test_loss"] < table.iloc[0]["test_loss"]
    assert rates(said(right)[0])[-1] < 1e-4 < 1e-2 < rates(said(wrong)[0])[-1]


def test_a_run_that_fails_is_recorded_as_such_where_the_helpers_are_not_installed(tmp_path):
    call = "    train(args, device)"
    script = own(tmp_path / "own", (call, f"{call}\n        raise ValueError(5)"))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = python(script, cwd=script.parent, env=os.environ | without_helpers(script.parent) | alone)
    assert done.returncode and done.stderr.endswith("ValueError: 5\n"), done.stderr
    run = runs.read_run(script.parent / "record")
    assert (run.state, run.status["why"], len(run.epochs)) == ("failed", "ValueError(5)", 6)


def test_all_ranks_stop_early_together_and_the_best_weights_are_kept(tmp_path):
    script, words = own(tmp_path / "together"), ("--epochs", "9", "--patience", "2", "--turn", "3")
    [together] = train(script, words=words, ranks=3)
    assert together.exit_statuses == [0, 0, 0], said(together)
    losses = [epoch["test_loss"] for epoch in runs.read_run(script.parent / "record").epochs]
    assert len(losses) == 5 and min(losses) == losses[2], "two epochs without progress after the third"
    assert [len(rates(text)) for text in said(together)] == [5, 5, 5], "each rank has trained for as many epochs"
    saved = torch.load(script.parent / "best.pt", weights_only=True)
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(2))
    loss = ((inputs @ saved["weight"].T + saved["bias"] - inputs.sum(1, keepdim=True)) ** 2).mean().item()
    assert loss == pytest.approx(losses[2], rel=1e-4), "the file holds the weights of the best epoch"


def test_where_rank_0_decides_alone_the_others_wait_for_it_in_the_next_backward(tmp_path):
    """The control of the one above. It leaves when another has begun, so that the wait has an end."""
    begins = "sampler.set_epoch(epoch)"
    changes = [("if without_progress ==", "if rank == 0 and without_progress =="), (begins, f"{begins}; begun(epoch)")]
    changes += [("def main():", "def begun(epoch):\n    Path(f'begun{epoch}').write_text(str(rank))\n\ndef main():")]
    leaves = "while not Path('begun6').exists():\n    time.sleep(0.05)\nos._exit(0)"
    script = own(tmp_path / "own", *changes, ("dist.barrier()\ndist.destroy_process_group()", leaves))
    [run] = train(script, words=("--epochs", "9", "--patience", "2", "--turn", "3"), ranks=3)
    assert run.exit_statuses[0] == 0 and not {*run.exit_statuses[1:]} & {0, None}, said(run)
    assert ".backward()" in "".join(said(run)[1:]) and [len(rates(text)) for text in said(run)] == [5, 5, 5], said(run)


def test_the_pages_task_trains_in_the_script_on_two_ranks(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    train(tmp_path / "task.py", ranks=1)
    words = ("--epochs", "5", "--lr", "0.01", "--run-dir", "record")
    [run] = train(tmp_path / "my_ddp.py", words=words)
    assert run.exit_statuses == [0, 0], said(run)
    table = runs.table(tmp_path / "record")
    assert scaling.metrics(table) == ["test_loss", "test_off"] and table.iloc[-1]["test_loss"] < 0.1
