"""What docs/your-script.md and scripts-and-jobs.md show works: each block of Python is run, beside its control."""

import io
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from changed_text import replaced
from real import LIMIT, python, until, without_helpers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from ddp_helpers import ROOT
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.launch.forked_script import ForkedScript, wait_for_runs
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.lessons.run_script import LearnerRun
from ddp_helpers.rank.scripts import write_script
from ddp_helpers.records import runs, scaling
from ddp_tools.explain.judge import judge
from ddp_tools.explain.lines import read_logs

PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("your-script.md", "scripts-and-jobs.md"))
SECTIONS = dict(re.findall(r"^###? (.+)\n((?:(?!^###? ).*\n)*)", PAGE, re.M))
BLOCKS = {
    title: blocks for title, text in SECTIONS.items() if (blocks := re.findall(r"```python\n(.*?)```", text, re.S))
}
TASK, RECORD, STOP = (
    "Your task in the scripts",
    "The record of your own script",
    "Early stopping: one rank stops, the others hang",
)
PASTED = {TASK, RECORD, STOP}  # into scripts; each of the others is run by itself
ALONE = {
    "A weighted sampler over ranks",
    "All predictions, in order, each once",
    "Freeze, and unfreeze later",
    "A contrastive loss over the batches of all ranks",
    "The same model on all ranks",
    "The old local rank",
    "A breakpoint on one rank",
    "VS Code, attached to one rank",
}
# In test_convert.py.
ELSEWHERE = {
    "3 Prove",
    "A loader of your own",
    "Augmentation, and a stop within an epoch",
    "Gradient accumulation",
    "A loss over unequal counts",
    "The test",
}


def test_every_block_of_the_page_is_run() -> None:
    assert BLOCKS.keys() == PASTED | ALONE | ELSEWHERE


# ---- pasted into a script: a record, early stopping, the best weights

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
    around, line, loop = [textwrap.indent(text, "    ") for text in BLOCKS[RECORD] + BLOCKS[STOP]]
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
    (tmp_path / "task.py").write_text(block(TASK))
    write_script("mnist_ddp", tmp_path / "my_ddp.py", parts=tmp_path / "task.py")
    words = ("--epochs", "5", "--lr", "0.01", "--run-dir", "record")
    [run] = train(tmp_path / "my_ddp.py", words=words)
    assert run.exit_statuses == [0, 0], said(run)
    table = runs.table(tmp_path / "record")
    assert scaling.metrics(table) == ["test_loss", "test_off"] and table.iloc[-1]["test_loss"] < 0.1


# ---- run by themselves


def block(title: str) -> str:
    """The block of Python below this heading."""
    [text] = BLOCKS[title]
    return text


def name_from(title: str, name: str) -> Any:
    """What a block calls by this name, once it has been run."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "DDP": DDP}
    exec(block(title), names)
    return names[name]


def explained_as(folder: Path, text: str) -> str:
    """The rule by which `explain` explains this output."""
    (folder / "output.log").write_text(text)
    return judge(read_logs([folder / "output.log"])).root.rule.id


def on_two_ranks(work: Callable[[], Any]) -> list:
    """What the function returns on each of two ranks; the first DDP of a process imports for seconds."""
    return on_ranks(2, work, patience=LIMIT)


# ---- on two ranks


class Net(nn.Module):
    """A network with as many layers as it is told."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def test_ranks_with_another_model_are_named_before_ddp_refuses(tmp_path: Path) -> None:
    ranks_that_differ = name_from("The same model on all ranks", "ranks_that_differ")
    named = on_two_ranks(lambda: [ranks_that_differ(Net(2)), ranks_that_differ(Net(2 + dist.get_rank()))])
    assert named == 2 * [[[], [1]]]
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks") as refused:  # the control
        on_two_ranks(lambda: DDP(Net(2 + dist.get_rank())))
    assert explained_as(tmp_path, f"RuntimeError: {refused.value}\n") == "same-model"


def test_weighted_draws_are_dealt_out_and_not_drawn_twice() -> None:
    share = name_from("A weighted sampler over ranks", "WeightedShare")
    weights = torch.arange(1.0, 41.0)

    def drawn() -> list[list[int]]:
        sampler = share(weights, draws=100)
        epochs = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        torch.manual_seed(0)
        return [*epochs, list(WeightedRandomSampler(weights.tolist(), 50))]

    (first, next_epoch, as_often_written), (second, _, the_same) = on_two_ranks(drawn)
    whole = torch.multinomial(weights, 100, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    assert (first, second) == (whole[::2], whole[1::2]) and first != second and first != next_epoch
    assert as_often_written == the_same  # the control


def test_predictions_come_in_order_and_once() -> None:
    in_order = name_from("All predictions, in order, each once", "in_order")

    def predict() -> tuple[list[int], list[int]]:
        numbers = torch.tensor(list(DistributedSampler(range(5), shuffle=False)))
        predictions = 10 * numbers
        one_after_the_other = [torch.empty_like(predictions) for _ in range(2)]
        dist.all_gather(one_after_the_other, predictions)
        return in_order(numbers, predictions, 5).tolist(), torch.cat(one_after_the_other).tolist()

    for right, as_often_written in on_two_ranks(predict):
        assert right == [0, 10, 20, 30, 40]
        assert as_often_written == [0, 20, 40, 10, 30, 0]  # the control: six, in another order


def test_what_is_unfrozen_later_learns_alike_once_it_is_wrapped_again() -> None:
    wrap_again = name_from("Freeze, and unfreeze later", "wrap_again")

    def gradient(wrap: Callable[[DDP], DDP]) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model[0].requires_grad_(False)
        ddp_model = DDP(model)
        model[0].requires_grad_(True)
        ddp_model = wrap(ddp_model)
        ddp_model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        return model[0].weight.grad.item()

    first, second = on_two_ranks(lambda: [gradient(wrap_again), gradient(lambda as_it_is: as_it_is)])
    assert first[0] == second[0] and first[1] != second[1]  # the control: without it


CONTRASTIVE = "A contrastive loss over the batches of all ranks"


class Features(nn.Module):
    """A layer, and a parameter in the loss, such as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        self.temperature = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.temperature


def test_a_loss_over_all_batches_has_the_gradient_of_one_process() -> None:
    """Of a parameter in the loss it is whole already: the page's hook leaves it, the loss's factor doubles it."""
    gather = name_from(CONTRASTIVE, "gather_with_gradient")
    [hook] = re.findall(r"`(features\.register_hook\(.*\))`", SECTIONS[CONTRASTIVE])
    [factor] = re.findall(r"`loss = contrastive\(gather_with_gradient\(features\)\) \* (.*)`", SECTIONS[CONTRASTIVE])
    data = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)

    def gradients(model: nn.Module, x: torch.Tensor, gathered: Callable, hook: str = "", factor: str = "1") -> list:
        features, temperature = model(x)
        exec(hook, {"features": features, "dist": dist})
        rows = gathered(features)
        ((temperature * rows @ rows.T).pow(2).mean() * eval(factor)).backward()
        return [weight.grad.flatten().tolist() for weight in model.parameters()]

    def of_a_rank(*given: Any) -> list:
        return gradients(DDP(Features()), data[2 * dist.get_rank() :][:2], *given)

    def carries_a_gradient() -> bool:
        mine = Features()(data[:2])[0]
        rows = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(rows, mine)
        return torch.cat(rows).requires_grad

    temperature, *layer = gradients(Features(), data, lambda rows: rows)
    whole = [temperature, *layer]
    halves = [[number / 2 for number in numbers] for numbers in layer]
    doubled = [2 * number for number in temperature]

    def all_ways() -> list:
        return [of_a_rank(gather, hook), of_a_rank(gather, "", factor), of_a_rank(gather), carries_a_gradient()]

    for hooked, multiplied, neither, carries in on_two_ranks(all_ways):
        assert hooked == approx(whole) and multiplied == approx([doubled, *layer])
        assert neither == approx([temperature, *halves]) and not carries  # the controls


def approx(rows: list[list[float]]) -> list:
    """These rows of numbers, but for rounding."""
    return [pytest.approx(row) for row in rows]


def test_the_debugger_opens_on_one_rank_and_the_others_wait() -> None:
    def answer(typed: bytes) -> str:
        keys, terminal = os.pipe()
        os.write(terminal, typed)
        os.close(terminal)
        os.dup2(keys, 0)
        with redirect_stdout(io.StringIO()) as screen:
            exec(block("A breakpoint on one rank"), {"dist": dist})
        return screen.getvalue()

    first, second = on_two_ranks(lambda: answer(b"up\np value\nvalue = 5\nc\n"))
    assert "(Pdb) 41\n" in first and "rank 0 goes on with 5\n" in first, first
    assert second == "rank 1 goes on with 42\n"


def test_a_debugger_answers_at_the_port_of_the_rank_that_listens_and_no_other_rank_does(tmp_path: Path) -> None:
    lines = replaced(block("VS Code, attached to one rank"), [("5678", "0")])  # 0: any free port
    (tmp_path / "listens.py").write_text(f"import sys\nimport debugpy\nrank = int(sys.argv[1])\n{lines}")
    command = [sys.executable, "listens.py"]
    other = subprocess.run([*command, "0"], cwd=tmp_path, stdout=subprocess.PIPE, timeout=LIMIT, check=True)
    with subprocess.Popen([*command, "1"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as rank:
        try:
            said = rank.stdout.readline()
            with socket.create_connection(("127.0.0.1", int(said.split()[-1])), timeout=LIMIT) as client:
                assert said.startswith("rank 1 listens") and client.recv(1000).startswith(b"Content-Length: ")
        finally:
            rank.kill()
    assert other.stdout == b""


# ---- launchers

TORCHRUN = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
OLD = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank')\nparser.parse_args()\n"


def environment() -> dict[str, str]:
    """The environment of a terminal that knows this Python's programs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean_environment() | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONUNBUFFERED": "1"}


def test_a_parser_that_knows_both_spellings_runs_under_both_launchers(tmp_path: Path) -> None:
    """The old one gives an argument, which a parser of the old spelling refuses; torchrun sets a variable."""
    (tmp_path / "train.py").write_text(block("The old local rank") + "import sys; print(sys.argv[1:])\n")
    (tmp_path / "old.py").write_text(OLD)
    old = python("-m", "torch.distributed.launch", *TORCHRUN, "train.py", cwd=tmp_path, env=environment())
    assert old.returncode == 0, old.stderr
    words = re.findall(r"local rank \d|\['--local-rank=\d'\]", old.stdout)
    assert sorted(words) == ["['--local-rank=0']", "['--local-rank=1']", "local rank 0", "local rank 1"]
    new = python("train.py", cwd=tmp_path, env=environment() | {"LOCAL_RANK": "1"})
    assert new.stdout == "local rank 1\n[]\n"
    refused = python("old.py", "--local-rank=0", cwd=tmp_path)  # the control
    assert refused.returncode == 2 and explained_as(tmp_path, refused.stderr) == "local-rank-argument"


WAITS = """import pathlib, os, time
pathlib.Path(f"here{os.environ['RANK']}").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


def test_under_nohup_a_job_outlives_its_terminal_only_if_torchrun_leaves_that_signal_alone(tmp_path: Path) -> None:
    [line] = re.findall(r"```bash\n(nohup .*) > train.log &\n", SECTIONS["nohup, and yet it ends with signal 1"])
    words = line.replace("--standalone", "--standalone --local-addr localhost").split()
    ways = {"lives": words, "ends": [word for word in words if not word.startswith("--signals-to-handle")]}
    assert ways["lives"] != ways["ends"]
    jobs = {}
    try:
        for name, command in ways.items():
            (folder := tmp_path / name).mkdir()
            (folder / "train.py").write_text(WAITS)
            with (folder / "train.log").open("w") as log:
                out = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                jobs[name] = subprocess.Popen(command, cwd=folder, env=environment(), **out)
        until(lambda: len([*tmp_path.glob("*/here*")]) == 4, "all ranks are there")
        for job in jobs.values():
            job.send_signal(signal.SIGHUP)  # as the kernel does when the terminal is closed
        assert jobs["ends"].wait(LIMIT) == 1
        (tmp_path / "lives" / "go").touch()
        assert jobs["lives"].wait(LIMIT) == 0
    finally:
        for folder in tmp_path.iterdir():
            (folder / "go").touch()
        for job in jobs.values():
            job.terminate()
            job.wait(LIMIT)
    assert explained_as(tmp_path, (tmp_path / "ends" / "train.log").read_text()) == "elastic-signal-hup"


# ---- trackers, with a real TensorBoard

tensorboard = pytest.mark.skipif(not find_spec("tensorboard"), reason="it comes with the extra `test`")
TRACKED = (ROOT / "notebooks" / "tracked_ddp.py").read_text()
RESULTS = ROOT / "notebooks" / "results" / "two_cpu_cores"


def changed(*changes: tuple[str, str]) -> str:
    """The script of the section on trackers with other words in the place of these."""
    return replaced(TRACKED, changes)


def track(epochs: int, scripts: dict[Path, str]) -> None:
    """Run scripts at once, each in its folder on two ranks, up to an epoch."""
    started = []
    for folder, text in scripts.items():
        (folder / "tracked_ddp.py").write_text(text)
        started.append(LearnerRun(folder / "tracked_ddp.py", "--epochs", epochs, ranks=2, folder=folder))
    wait_for_runs(*started)
    for run in started:
        assert run.exit_statuses == [0, 0], run.complaint()


def noted(run: Path, name: str) -> list[tuple[int, float]]:
    """The steps and values that TensorBoard's own reader has of a number of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def curves(folder: Path) -> list[list[int]]:
    """The steps of each curve that TensorBoard shows of a folder's runs, the shortest first."""
    folders = (folder / "logs").iterdir()
    return sorted(([step for step, _ in noted(run, "loss")] for run in folders), key=len)


@tensorboard
def test_a_run_that_goes_on_is_one_curve_of_the_mean_of_all_ranks(tmp_path: Path) -> None:
    """It is killed when epoch 3 is noted, and not saved. Each rule of the page is left out once, beside it."""
    killed, everybody = tmp_path / "killed", tmp_path / "everybody"
    purge, write = ", purge_step=first)", "            part.replace(args.checkpoint)"
    alone = [("    if rank == 0:", "    if True:"), ("uuid.uuid4().hex[:8]", "1"), (purge, ")")]
    alone += [('with_suffix(".part")', 'with_suffix(f".part{rank}")'), ("dist.all_reduce(mean)", "mean")]
    for folder in (killed, everybody):
        folder.mkdir()
    track(3, {killed: changed((write, f"            epoch == 3 or{write[11:]}")), everybody: changed(*alone)})
    rules = {"all": (), "purge": ((purge, ")"),), "one run": (('state["run_id"]), p', "uuid.uuid4().hex), p"),)}
    for name in rules:
        shutil.copytree(killed, tmp_path / name)
    track(4, {tmp_path / name: changed(*changes) for name, changes in rules.items()})
    assert curves(killed) == [[1, 2, 3]] and curves(tmp_path / "all") == [[1, 2, 3, 4]]
    assert curves(tmp_path / "purge") == [[1, 2, 3, 3, 4]], "epoch 3 is there twice"
    assert curves(tmp_path / "one run") == [[3, 4], [1, 2, 3]], "a second curve"
    [run] = (tmp_path / "all" / "logs").iterdir()
    shares = noted(everybody / "logs" / "run-1", "loss")
    assert sorted(step for step, _ in shares) == [1, 1, 2, 2, 3, 3], "where all ranks write, each is there twice"
    one, other = (value for step, value in shares if step == 1)
    assert one != pytest.approx(other, rel=1e-3)
    assert noted(run, "loss")[0] == (1, pytest.approx(one + other, rel=1e-5)), "half the loss of each rank: their mean"


@tensorboard
def test_records_are_shown_as_they_are_up_to_half_a_line(tmp_path: Path) -> None:
    show = runpy.run_path(str(ROOT / "notebooks" / "track_runs.py"))["main"]
    logs, whole, cut = tmp_path / "logs", RESULTS / "strong-1x1-cpus1-seed2", tmp_path / "cut"
    cut.mkdir()
    text = (whole / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text[: len(text) - 9])
    show([str(logs), str(whole), str(cut)])
    epochs = text.count("\n")
    for run, last in ((whole, epochs), (cut, epochs - 1)):
        assert [step for step, _ in noted(logs / run.name, "train_loss")] == [*range(1, last + 1)]
    before = sorted(tmp_path.rglob("*"))
    for words, told in (([logs], "give"), ([logs, tmp_path], "has no metrics.jsonl"), ([logs, whole], "is there")):
        with pytest.raises(SystemExit, match=rf"^.*{told}.*$"):
            show([str(word) for word in words])
    assert sorted(tmp_path.rglob("*")) == before
