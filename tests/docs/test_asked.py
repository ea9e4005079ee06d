"""What docs/asked.md shows works: each block of Python is run, on two real ranks, beside its control."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real import LIMIT, python, until
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from ddp_helpers import ROOT
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.launch.launchers import clean_environment
from ddp_tools.explain.judge import judge
from ddp_tools.explain.lines import read_logs

PAGE = (ROOT / "docs" / "asked.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", PAGE, re.M))
BLOCKS = {title: re.findall(r"```python\n(.*?)```", text, re.S) for title, text in SECTIONS.items()}
USED = {
    "The old local rank",
    "The same model on all ranks",
    "A weighted sampler over ranks",
    "All predictions, in order, each once",
    "One rank stops early, the others hang",
    "Freeze, and unfreeze later",
    "A contrastive loss over the batches of all ranks",
    "A breakpoint on one rank",
    "h5py with workers",
}


def test_every_block_of_the_page_is_run() -> None:
    assert {title for title, blocks in BLOCKS.items() if blocks} == USED


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


def test_all_ranks_stop_in_the_same_epoch() -> None:
    early_stop = name_from("One rank stops early, the others hang", "EarlyStop")
    losses = [[3, 2, 1, 1, 1, 1, 1], [3, 3, 3, 3, 3, 3, 3]]

    def epochs() -> tuple[int, int]:
        mine, stop = losses[dist.get_rank()], early_stop(patience=2)
        shared = [stop(loss) for loss in mine].index(True)
        alone = next(epoch for epoch in range(2, 7) if min(mine[: epoch - 1]) <= min(mine[epoch - 1 : epoch + 1]))
        return shared, alone

    (shared, one), (also, other) = on_two_ranks(epochs)
    assert shared == also and one != other  # the control: by its own loss, each rank stops in another epoch


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


# ---- files and forks


def test_a_file_that_is_opened_before_the_fork_has_one_place_for_all(tmp_path: Path) -> None:
    rows = name_from("h5py with workers", "Rows")
    (tmp_path / "rows.bin").write_bytes(bytes(range(100)))

    def place_after_a_worker_has_read(opened_before: bool) -> int:
        dataset = rows(tmp_path / "rows.bin", 100, open_file=io.FileIO)
        if opened_before:
            dataset.opened()
        if (worker := os.fork()) == 0:
            os.read(dataset.opened().fileno(), 10)
            os._exit(0)
        os.waitpid(worker, 0)
        return dataset.opened().tell()

    assert place_after_a_worker_has_read(opened_before=False) == 0
    assert place_after_a_worker_has_read(opened_before=True) == 10  # the control


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
