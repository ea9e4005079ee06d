"""The lines to remember of 01 to 06, one after the other, are a script for two ranks; those of 12 profile one."""

import ast
import re

import nbformat
import pytest
from notebook_texts import cells
from real import LIMIT

from ddp_helpers import ROOT
from ddp_helpers.launch import launch
from ddp_helpers.launch.engine import LaunchError
from ddp_helpers.lessons.find_the_lost_time import trace

PATHS = {
    path.stem[:2]: path for pattern in ("0[1-6]", "12") for path in (ROOT / "notebooks").glob(f"{pattern}_*.ipynb")
}
# The device and the group come first, as in every script: 03 has the whole of the line with which 02 begins.
ORDER = ("03", "02", "01", "04", "05", "06")
ONCE = {"init_process_group", "barrier", "destroy_process_group"}  # the first where 03 stands, the others at the end
# What the notebooks' own cells define above these lines, and a reader has: data, a network, and numbers.
OWN = """
batch_size, lr, bf16, loading, seed, clock = 8, 0.1, False, {}, 1, time.perf_counter
some = torch.utils.data.TensorDataset(torch.randn(32, 1, 4, 4), torch.arange(32) % 2)


def network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))


Net = network
"""
# At the end all ranks hold the same weights.
SAME = """
weights = torch.cat([weight.detach().flatten() for weight in ddp_model.parameters()])
first = weights.clone()
dist.broadcast(first, 0)
print("the weights of rank 0:", torch.equal(weights, first))
dist.barrier()
dist.destroy_process_group()
"""


def remembered(number):
    """The code below *The lines to remember* of a notebook, without its magic."""
    parts = nbformat.read(PATHS[number], as_version=4).cells
    [heading] = [place for place, part in enumerate(parts) if "the lines to remember" in part.source.lower()]
    assert parts[heading].cell_type == "markdown" and parts[heading + 1].cell_type == "code", number
    return re.sub(r"\A%%.*\n", "", parts[heading + 1].source)


def imports(number):
    """What the cells of a notebook import of Python and of PyTorch, by the name that it gets."""
    found = {}
    for cell in cells(PATHS[number], "code"):
        lines = re.sub(r"^[%!].*$", "", cell, flags=re.M)
        try:
            tree = ast.parse(lines)
        except SyntaxError:  # a cell for bash or Slurm
            continue
        for part in ast.walk(tree):
            if isinstance(part, ast.Import | ast.ImportFrom):
                for alias in part.names:
                    one = ast.ImportFrom(part.module, [alias], 0) if hasattr(part, "module") else ast.Import([alias])
                    found[alias.asname or alias.name.partition(".")[0]] = ast.unparse(one)
    return found


def called(statement):
    """The method that a line calls, if it does nothing else."""
    call = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
    return getattr(getattr(call, "func", None), "attr", "")


def script(*numbers):
    """A script of the lines to remember of these notebooks, and the imports that they need."""
    texts, used = [], {}
    for number in numbers:
        tree = ast.parse(remembered(number))
        elsewhere = ONCE - {"init_process_group"} if number == "03" else ONCE
        kept = [part for part in tree.body if called(part) not in elsewhere]
        names = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}
        used |= {name: line for name, line in imports(number).items() if name in names}
        texts.append(ast.unparse(ast.Module(kept, [])))
    return "\n".join(["import time", *used.values(), texts[0], OWN, *texts[1:], SAME])


@pytest.fixture(scope="module")
def whole():
    """The script of all of them."""
    return script(*ORDER)


def test_one_after_the_other_they_are_a_script_for_two_ranks(whole, tmp_path):
    path = tmp_path / "remembered.py"
    path.write_text(whole)
    done = launch.run(path, ranks=2, timeout=LIMIT, env={"CUDA_VISIBLE_DEVICES": ""})
    said = [line for _, line in done.lines]
    for part in ("the mean is 0.5", "accuracy 0.80 of 5 test samples", "/96 right", "to save: weight, bias"):
        assert sum(part in line for line in said) == 1, (part, said)
    assert said.count("the weights of rank 0: True") == 2, said


def test_without_the_lines_of_one_notebook_they_are_none(tmp_path):
    path = tmp_path / "remembered.py"
    path.write_text(script(*(number for number in ORDER if number != "03")))
    with pytest.raises(LaunchError, match="Default process group has not been initialized"):
        launch.run(path, ranks=2, timeout=LIMIT, env={"CUDA_VISIBLE_DEVICES": ""})


def test_device_group_model_wrapper_and_optimizer_come_in_this_order(whole):
    of_05 = remembered("05")
    first = [whole.find(line) for line in ("set_device(", "init_process_group(", "ddp_model = DDP(")]
    then = [of_05.find(line) for line in ("model = network()", "ddp_model = DDP(", "optimizer = ")]
    for places in (first, then):
        assert -1 not in places and places == sorted(places), places


# What 12's cells define above its lines, and a reader has.
LOOP = """
import sys
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, device, work, loading = dist.get_rank(), "cpu", sys.argv[1], {"batch_size": 4}


def Sequences():
    return [torch.randn(3) for _ in range(24)]


def mlp():
    return torch.nn.Linear(3, 3)
"""


def test_the_lines_of_12_leave_a_trace_of_each_rank_that_the_account_reads(tmp_path):
    known, lines = imports("12"), remembered("12")
    names = ("torch", "dist", "DDP", "profile", "record_function", "schedule")
    begin = "\n".join([*(known[name] for name in names), LOOP])
    path = tmp_path / "profiled.py"

    def profiled(text):
        path.write_text("\n".join([begin, text, "dist.destroy_process_group()"]))
        launch.run(path, tmp_path, ranks=2, timeout=LIMIT, env={"CUDA_VISIBLE_DEVICES": ""})

    profiled(lines)
    table = trace.account(trace.read_traces(tmp_path, "mine"))
    assert list(table.index) == [0, 1] and table["step"].min() > 0 and table["data"].min() > 0
    with pytest.raises(LaunchError, match="before exporting"):  # the control: no step ever ends
        profiled(lines.replace("prof.step()", "pass"))


def test_a_whole_step_of_14_has_its_parts_in_order_and_its_comments_put_the_scaler_where_the_notebook_has_it():
    [text] = [cell for cell in cells(ROOT / "notebooks" / "14_fit_the_model.ipynb", "code") if "(loss / 4)" in cell]
    step = ["zero_grad()", "no_sync()", "autocast(", "(loss / 4).backward()", "clip_grad_norm_(", "optimizer.step()"]
    begin = text.index("optimizer.zero_grad()")
    places = [text.find(part, begin) for part in [*step, "schedule.step()"]]
    assert -1 not in places and places == sorted(places), places
    scaled = ["scaler.scale(", "scaler.unscale_(", "clip_grad_norm_(", "scaler.step(", "scaler.update("]
    for whole in (
        text,
        *(cell for cell in cells(ROOT / "notebooks" / "14_fit_the_model.ipynb", "code") if "def whole_step" in cell),
    ):
        last = [whole.rfind(part) for part in scaled]
        assert -1 not in last and last == sorted(last), last
