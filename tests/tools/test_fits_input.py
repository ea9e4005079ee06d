"""`fits` without --input reads the shape of a sample off the first layer, and asks where it cannot."""

from pathlib import Path

import pytest
import torch
from refusals import refused

from ddp_helpers.cli import main
from ddp_helpers.launch.forked_script import ForkedScript, wait_for_runs
from ddp_tools import fits, model_file

MODELS = """
import torch
from torch import nn
class Net(nn.Sequential):
    def __init__(self): super().__init__(nn.Flatten(), nn.Dropout(), nn.Linear(784, 10))
class Images(nn.Sequential):
    def __init__(self): super().__init__(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
class Texts(nn.Sequential):
    def __init__(self): super().__init__(nn.Embedding(128, 8), nn.Linear(8, 128))
class Steps(nn.LSTM):
    def __init__(self): super().__init__(12, 8)
class Reads(nn.Linear):  # its making needs values
    def __init__(self): super().__init__(4, 4); self.weight.sum().item()
class Own(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(3)); self.out = nn.Linear(3, 3)
class Backwards(nn.Module):  # its last layer is the first that it makes
    def __init__(self): super().__init__(); self.out = nn.Linear(8, 3); self.stem = nn.Linear(5, 8)
    def forward(self, x): return self.out(self.stem(x))
class Bare(nn.Identity): pass
class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 3)(torch.zeros(5))
class Named(Net):
    def forward(self, x): return super().forward(x["pixels"])
class WithLabels(Net):
    def forward(self, x, labels): return super().forward(x)
class OfWidth(Net):
    def __init__(self, width): super().__init__()
class Lazy(nn.Sequential):
    def __init__(self): super().__init__(nn.LazyLinear(10))
class Sparse(nn.Sequential):
    def __init__(self): super().__init__(nn.Embedding(128, 8, sparse=True), nn.Linear(8, 128))
class Pixels(nn.Conv2d):
    def __init__(self): super().__init__(3, 8, 3); self.register_buffer("table", torch.zeros(10**6))
TABLE, NET, wrong = torch.zeros(10**6), nn.Linear(4, 4), 7
class Constant(nn.Linear):
    def __init__(self): super().__init__(4, 4); self.register_buffer("table", TABLE)
def same(): return NET
def three(): return 3
def learn(): Reads()(torch.zeros(2, 4)).sum().backward()
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A file of somebody's models."""
    (tmp_path / "my.py").write_text(MODELS)
    return tmp_path / "my.py"


@pytest.mark.parametrize(("name", "numbers"), [("Net", 784), ("Reads", 4)])
def test_a_linear_layer_tells_how_many_numbers_a_sample_has(name: str, numbers: int, models: Path, capsys) -> None:
    assert main(["fits", f"{models}:{name}"]) == 0
    read, *table = capsys.readouterr().out.splitlines()
    assert f"takes {numbers} numbers" in read and "--input" in read
    assert main(["fits", f"{models}:{name}", "--input", str(numbers)]) == 0
    assert capsys.readouterr().out.splitlines() == table, "with the shape given, nothing is read, and all is the same"


REFUSED = {  # what the line says
    # the first layer leaves the shape open
    "Images": "--input 3 32 32: the first layer with weights, Conv2d, takes 3 channels of any size",
    "Texts": "--input 128: the first layer with weights, Embedding, takes any number of tokens",
    "Steps": "--input 100 12: the first layer with weights, Steps, takes 12 numbers at each of any",
    "Own": "as in --input 1 28 28: the first layer with weights, Own, does not determine it",
    "Bare": "as in --input 1 28 28: no layer has weights",
    "Fails": "the model cannot be made: my.py:23: RuntimeError",
    # a model that cannot be counted
    "Named --input 784": "a small class around it",
    "WithLabels --input 784": "a small class around it",
    "OfWidth --input 784": "a small class around it",
    "Lazy --input 784": "give its sizes",
    "Sparse --input 16 --type int64": "sparse=False",
    # other words
    "Net --input 5": "a step on an input of (32, 5), torch.float32",
    "Texts --input 128 --type float32": "(32, 128), torch.float32: RuntimeError",
    "Net --input 5 --batch-size-per-rank 0": "every number must be 1 or more",
    "Net --input 5 --batch-size 8": "--batch-size",
    "Net --input 5 --optimizer Best": "'Best' is not in torch.optim",
    "Net --input 784 --optimizer LBFGS": "'LBFGS' is not in torch.optim or needs a closure",
    "eight --input 5": "no class and no function 'eight'",
    "wrong --input 5": "no class and no function 'wrong'",
    "three --input 4": "int, not an nn.Module",
    "learn --input 4": "backward() is called",
    "same --input 4": "make a new model in each call",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_counted_is_told_in_a_line_with_what_to_give_instead(words: str, models: Path) -> None:
    name, *flags = words.split()
    refused(main, ["fits", f"{models}:{name}", *flags], named=[REFUSED[words]])


def test_what_is_no_file_of_models_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    for file in ("other.py:two", "my.py"):
        refused(main, ["fits", file, "--input", "5"], named=["is not FILE.py:NAME"])
    cannot = "bad.py cannot be imported: bad.py:1: ZeroDivisionError"
    refused(main, ["fits", "bad.py:two", "--input", "5"], named=[cannot])


def test_where_another_layer_comes_first_the_line_says_what_was_taken(models: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["fits", f"{models}:Backwards"])
    out, err = capsys.readouterr()
    assert "takes 8 numbers" in out and "--input sets a different" in out and "(32, 8)" in err
    assert main(["fits", f"{models}:Backwards", "--input", "5"]) == 0


def test_the_examples_that_are_named_can_be_given(models: Path, capsys) -> None:
    for name, shape in (("Images", "3 32 32"), ("Texts", "128")):  # tokens are whole numbers, without --type
        assert main(["fits", f"{models}:{name}", "--input", *shape.split()]) == 0
        assert "DDP fits a GPU" in capsys.readouterr().out


MOVED = """
import copy
import torch
from torch import nn
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.second.weight, self.again = self.first.weight, self.first  # a weight and a layer that are shared
        self.norm.requires_grad_(False)
    def forward(self, x): return self.again(self.norm(self.second(self.first(x))))
class Steps(nn.LSTM):
    def __init__(self): super().__init__(12, 8)
class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))
    def forward(self, x):
        for layer in (layer for stage in self.stages for layer in stage): x = layer(x)
        return x
def to(): return Plain().to("cpu")
def floats(): return Plain().float().to("cpu", torch.float32)
def empty(): return Plain().to_empty(device="cpu")
def half(): return Plain().half()
def copied(): return copy.deepcopy(nn.ModuleList([nn.Identity(), Plain()]))[1]
def bfloat16(): return Plain().to(torch.bfloat16)
def double(): return Plain().double()
def steps(): return nn.Sequential(Steps()).float()
"""


def counted(file: Path, name: str, shape: list[int] | None = None) -> dict:
    """What DDP holds on a GPU, for a model of a file."""
    make = model_file.load(f"{file}:{name}")
    prediction = fits.predict(make, *model_file.sample_of(make, shape)[:2], batch_size_per_rank=8)
    assert "without memory" in prediction["how"]
    return next(row for row in prediction["rows"] if row["way"] == "DDP")


def test_a_model_that_its_maker_moves_or_converts_is_counted_without_memory(tmp_path: Path) -> None:
    (file := tmp_path / "moved.py").write_text(MOVED)
    plain = counted(file, "Plain")
    assert plain["parameters"] == 4 * (64 * 64 + 4 * 64) and plain["gradients"] == 4 * (64 * 64 + 2 * 64)
    for name in ("to", "floats", "empty", "copied"):
        assert counted(file, name) == plain, name
    for name, size in (("half", 0.5), ("bfloat16", 0.5), ("double", 2)):  # shared weights are still one
        assert counted(file, name)["parameters"] == size * plain["parameters"], name
    # A recurrent layer keeps a list of its weights, and makes it anew where it is converted.
    assert counted(file, "steps", [100, 12]) == counted(file, "Steps", [100, 12])
    assert counted(file, "Nested")["parameters"] == 4 * 4 * (8 * 8 + 8)  # lists of lists are cut by their elements
    # The input has the type of the first weights.
    makes = [model_file.load(f"{file}:{name}") for name in ("to", "half", "bfloat16", "double")]
    types = [model_file.sample_of(make)[1] for make in makes]
    assert types == [torch.float32, torch.float16, torch.bfloat16, torch.float64]


STARTS = """
import os, sys, argparse, torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.utils.data import DataLoader
class Net(nn.Linear):
    def __init__(self): super().__init__(4, 4)
def train(rank=0):
    while True:
        try: Net()(torch.zeros(2, 4)).sum().backward()
        except Exception: pass
"""


@pytest.mark.parametrize(
    "start",
    [
        "argparse.ArgumentParser().parse_args()",
        "train()",
        "dist.init_process_group('gloo', init_method='tcp://192.0.2.1:1', rank=1, world_size=2)",
        "multiprocessing.spawn(train, nprocs=2)",
        "list(DataLoader(range(3)))",
        "sys.exit('no GPU')",
        "rank = int(os.environ['NO_RANK'])",
    ],
)
def test_a_script_without_a_main_guard_is_told_where_to_put_it(start: str, tmp_path: Path, capfd) -> None:
    (file := tmp_path / "script.py").write_text(f"{STARTS}{start}\n")
    guard = 'put the start under `if __name__ == "__main__":`'
    refused(main, ["fits", f"{file}:Net"], named=["script.py cannot be imported", guard])
    assert not capfd.readouterr().out
    file.write_text(f'{STARTS}if __name__ == "__main__": {start}\n')
    assert main(["fits", f"{file}:Net"]) == 0


def test_what_the_file_made_at_its_import_is_counted_too(models: Path) -> None:
    rows = fits.predict(model_file.load(f"{models}:Constant"), (4,), batch_size_per_rank=1)["rows"]
    assert all(4e6 < row["peak"] < 4.01e6 for row in rows)


FORKS = """
import multiprocessing, sys, torch
from ddp_tools import fits, model_file
make = model_file.load(sys.argv[1])
fits.predict(make, *model_file.sample_of(make)[:2])
rank = multiprocessing.get_context("fork").Process(target=torch.ones((), requires_grad=True).backward)
rank.start()
rank.join()
sys.exit(rank.exitcode)
"""


def test_ranks_can_be_forked_after_a_prediction(models: Path, tmp_path: Path) -> None:
    """In a process of its own: the first backward of a process decides."""
    (script := tmp_path / "forks.py").write_text(FORKS)
    wait_for_runs(run := ForkedScript(script, f"{models}:Net", ranks=1))
    assert run.exit_statuses == [0], run.lines_of_rank(0)


def test_the_table_says_which_loss_was_taken_and_what_buffers_have(models: Path, capsys) -> None:
    assert main(["fits", f"{models}:Pixels", "--input", "3", "10", "10"]) == 0
    told = capsys.readouterr().out
    assert "over the last dimension of the output, 32 x 8 x 8 x 8" in told and "Buffers, 0.004 GB" in told
    assert main(["fits", f"{models}:Net"]) == 0
    assert "Buffers" not in capsys.readouterr().out
