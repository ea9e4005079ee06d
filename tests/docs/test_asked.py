"""What docs/asked.md shows works: each block of Python is run, on two real ranks, beside its control."""

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real import LIMIT
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


def block(title: str) -> str:
    """The block of Python below this heading."""
    [text] = BLOCKS[title]
    return text


def name_from(title: str, name: str) -> Any:
    """What a block calls by this name, once it has been run."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "DDP": DDP}
    exec(block(title), names)
    return names[name]


def explained_as(tmp_path: Path, text: str) -> str:
    """The rule by which `explain` explains this output."""
    (tmp_path / "output.log").write_text(text)
    verdict = judge(read_logs([tmp_path / "output.log"]))
    return verdict.root.rule.id


TORCHRUN = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]


def environment() -> dict[str, str]:
    """The environment of a terminal that knows this Python's programs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean_environment() | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONUNBUFFERED": "1"}


def launch(folder: Path, script: str, *command: str, said: str = "") -> subprocess.CompletedProcess:
    """Start a script by this command, with something typed, to its end."""
    (folder / "train.py").write_text(script)
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": LIMIT}
    return subprocess.run([*command, "train.py"], cwd=folder, env=environment(), input=said, **out)


def on_two_ranks(work: Callable[[], Any]) -> list:
    """What the function returns on each of two ranks; the first DDP of a process imports for seconds."""
    return on_ranks(2, work, patience=LIMIT)


def test_every_block_of_the_page_is_run() -> None:
    assert {title for title, blocks in BLOCKS.items() if blocks} == USED


# ---- on two ranks


class Net(nn.Module):
    """A network with as many classes as it is told."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(classes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


ANOTHER_MODEL = """import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
layers = [nn.Linear(4, 4) for _ in range(2 + dist.get_rank())]
nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
"""


def test_ranks_with_another_model_are_named_before_ddp_refuses(tmp_path: Path) -> None:
    ranks_that_differ = name_from("The same model on all ranks", "ranks_that_differ")
    assert on_two_ranks(lambda: ranks_that_differ(Net(2))) == [[], []]
    assert on_two_ranks(lambda: ranks_that_differ(Net(2 + dist.get_rank()))) == [[1], [1]]
    done = launch(tmp_path, ANOTHER_MODEL, "torchrun", *TORCHRUN)
    assert done.returncode == 1 and explained_as(tmp_path, done.stdout) == "same-model"


def test_weighted_draws_are_dealt_out_and_not_drawn_twice() -> None:
    share = name_from("A weighted sampler over ranks", "WeightedShare")
    weights = torch.arange(1.0, 41.0)

    def drawn(epoch: int) -> list[int]:
        sampler = share(weights, draws=100)
        sampler.set_epoch(epoch)
        return list(sampler)

    first, second = on_two_ranks(lambda: drawn(0))
    whole = torch.multinomial(weights, 100, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    assert (first, second) == (whole[::2], whole[1::2]) and first != second
    assert on_two_ranks(lambda: drawn(1))[0] != first

    def as_often_written() -> list[int]:
        torch.manual_seed(0)
        return list(WeightedRandomSampler(weights.tolist(), 50))

    assert len(set(map(tuple, on_two_ranks(as_often_written)))) == 1  # the control: the same on both


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

    def gradient(again: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model[0].requires_grad_(False)
        ddp_model = DDP(model)
        model[0].requires_grad_(True)
        if again:
            ddp_model = wrap_again(ddp_model)
        ddp_model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        return model[0].weight.grad.item()

    first, second = on_two_ranks(lambda: gradient(again=True))
    assert first == second
    first, second = on_two_ranks(lambda: gradient(again=False))
    assert first != second  # the control


def test_a_loss_over_all_batches_has_the_gradient_of_one_process() -> None:
    gather = name_from("A contrastive loss over the batches of all ranks", "gather_with_gradient")
    data = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)

    def layer() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(2, 2, dtype=torch.float64)

    def gradient(gather_rows: Any) -> list[list[float]]:
        ddp_model = DDP(layer())
        features = gather_rows(ddp_model(data[2 * dist.get_rank() :][:2]))
        loss = (features @ features.T).pow(2).mean() * dist.get_world_size()
        loss.backward()
        return ddp_model.module.weight.grad.tolist()

    model = layer()
    features = model(data)
    (features @ features.T).pow(2).mean().backward()
    for answer in on_two_ranks(lambda: gradient(gather)):
        torch.testing.assert_close(torch.tensor(answer, dtype=torch.float64), model.weight.grad)

    def without(mine: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(rows, mine.detach())
        return torch.cat(rows)

    with pytest.raises(RuntimeError, match="does not require grad"):  # the control
        on_two_ranks(lambda: gradient(without))


def test_a_parameter_of_that_loss_has_its_whole_gradient_already() -> None:
    """Such as CLIP's temperature: the hook of the page leaves it as it is, the factor of the loss doubles it."""
    title = "A contrastive loss over the batches of all ranks"
    gather = name_from(title, "gather_with_gradient")
    [hook] = re.findall(r"`(features\.register_hook\(.*\))`", SECTIONS[title])
    data = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 2, dtype=torch.float64)
            self.temperature = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.temperature

    def loss_of(features: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return (temperature * features @ features.T).pow(2).mean()

    def gradients(line: str) -> list[list[float]]:
        ddp_model = DDP(Model())
        features, temperature = ddp_model(data[2 * dist.get_rank() :][:2])
        exec(line, {"features": features, "dist": dist})
        factor = 1 if line else dist.get_world_size()
        (factor * loss_of(gather(features), temperature)).backward()
        return [weight.grad.flatten().tolist() for weight in ddp_model.parameters()]

    model = Model()
    loss_of(*model(data)).backward()
    whole = [weight.grad.flatten().tolist() for weight in model.parameters()]
    for answer in on_two_ranks(lambda: gradients(hook)):
        assert answer == [pytest.approx(expected) for expected in whole]
    temperature = [name for name, _ in model.named_parameters()].index("temperature")
    for answer in on_two_ranks(lambda: gradients("")):  # the control
        assert answer[temperature] == pytest.approx([2 * whole[temperature][0]])


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

OLD = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank')\nparser.parse_args()\n"
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", *TORCHRUN)


@pytest.mark.parametrize("launcher", [LAUNCH, (sys.executable, "-m", "torch.distributed.run", *TORCHRUN)])
def test_a_parser_that_knows_both_spellings_runs_under_both_launchers(tmp_path: Path, launcher: tuple) -> None:
    done = launch(tmp_path, block("The old local rank"), *launcher)
    assert done.returncode == 0, done.stdout
    assert sorted(re.findall(r"local rank \d", done.stdout)) == ["local rank 0", "local rank 1"]


def test_a_parser_of_the_old_spelling_is_refused_by_the_old_launcher_and_that_is_explained(tmp_path: Path) -> None:
    done = launch(tmp_path, OLD, *LAUNCH)
    assert done.returncode != 0 and explained_as(tmp_path, done.stdout) == "local-rank-argument"


WAITS = """import pathlib, os, time
pathlib.Path(f"here{os.environ['RANK']}").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("lives", [True, False])
def test_under_nohup_a_job_outlives_its_terminal_only_if_torchrun_leaves_that_signal_alone(
    tmp_path: Path, lives: bool
) -> None:
    [line] = re.findall(r"```bash\n(nohup .*) > train.log &\n", SECTIONS["nohup, and yet it ends with signal 1"])
    words = [word for word in line.split() if lives or not word.startswith("--signals-to-handle")]
    words[words.index("--standalone") + 1 : 0] = []
    words[words.index("--standalone") : words.index("--standalone") + 1] = ["--standalone", "--local-addr", "localhost"]
    (tmp_path / "train.py").write_text(WAITS)
    with (tmp_path / "train.log").open("w") as log:
        job = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + LIMIT
        while not all((tmp_path / f"here{rank}").exists() for rank in (0, 1)) and time.monotonic() < end:
            time.sleep(0.05)
        job.send_signal(signal.SIGHUP)  # as the kernel does when the terminal is closed
        if lives:
            time.sleep(1)
            (tmp_path / "go").touch()
        assert job.wait(LIMIT) == (0 if lives else 1)
    if not lives:
        assert explained_as(tmp_path, (tmp_path / "train.log").read_text()) == "elastic-signal-hup"


def test_the_debugger_opens_on_one_rank_and_the_others_wait(tmp_path: Path) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    script += block("A breakpoint on one rank") + "dist.destroy_process_group()\n"
    done = launch(tmp_path, textwrap.dedent(script), "torchrun", *TORCHRUN, said="up\np value\nc\n")
    assert done.returncode == 0 and done.stdout.count("(Pdb)") >= 1, done.stdout
    assert "41\n" in done.stdout and "rank 0 goes on with 41" in done.stdout and "rank 1 goes on with 42" in done.stdout
