"""write_script: the same bytes as the module, or with a learner's own parts in their place; nothing lost."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import own_parts
import pytest
from IPython.core.interactiveshell import InteractiveShell
from real import python, without_helpers
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.rank.scripts import NAMES, script_text, write_script


def parsed(text):
    """The functions and classes of a program, by name, as their text is without layout."""
    return {node.name: ast.unparse(node) for node in ast.parse(text).body if hasattr(node, "name")}


# Each written script is run as the program, one after the other: what it says, or its error, by its name.
RUN_ALL = """
import contextlib, io, json, os, runpy, sys
folder, *names = sys.argv[1:]
said = {}
for name in names:
    sys.argv = [f"{folder}/{name}.py", "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, (name, end.code)
    said[name] = out.getvalue()
print(json.dumps(said))
"""


def test_a_script_needs_no_helpers_and_says_its_flags(tmp_path):
    for name in NAMES:
        write_script(name, tmp_path / f"{name}.py")
    env = {**os.environ, **without_helpers(tmp_path)}
    done = python("-c", RUN_ALL, tmp_path, *NAMES, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = dict.fromkeys(NAMES, "--data") | {"simple_ddp": "all 1 ranks hold the same model"}
    said = json.loads(done.stdout.splitlines()[-1])
    assert {name for name in NAMES if expected[name] not in said[name]} == set()


def test_a_script_is_written_where_nothing_is_installed(tmp_path):
    code = "from ddp_helpers.rank.scripts import NAMES, write_script\nimport sys\n"
    code += "for name in NAMES: write_script(name, name)\nassert not {'torch', 'numpy', 'jinja2'} & {*sys.modules}"
    command = [sys.executable, "-S", "-c", code]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: script_text(name) for name in NAMES}


# ---- a learner's own parts


def test_own_parts_stand_where_those_of_their_names_stood():
    before, after = parsed(script_text("mnist_ddp")), parsed(script_text("mnist_ddp", own_parts.PARTS))
    own = parsed(Path(own_parts.__file__).read_text())
    assert after == before | {name: own[name] for name in ("Net", "Block", "datasets", "loss_and_metrics")}
    names = list(after)
    assert names.index("Block") < names.index("Net") and names.index("train") < names.index("datasets")


CELLS = {
    "imports": """%load_ext autoreload
from math import floor, tau as turn
import numpy as np
from pathlib import Path
import torch.fx
import torch
from torch import nn
from torch.nn import functional as F
width = 3""",
    "Net": """class Net(nn.Module):
    def forward(self, x):
        width = floor(turn)
        return F.relu(x) * width * np.pi * torch.fx.__name__.count("t") * len(str(Path()))""",
    "Outside": """class Net(nn.Module):
    def forward(self, x):
        return x * width""",
    "Based": """class Base(nn.Module):
    def extra(self):
        return 1
class Net(Base):
    def forward(self, x):
        return x""",
    "NoMethod": """class Net(nn.Module):
    pass""",
    "Missing": """def make_optimizer(model, args):
    return nowhere(model)""",
    "another F": """import torch.fft as F""",
    "a part": """from math import gamma as train""",
    "Uses": """def make_optimizer(model, args):
    return train(model)""",
}


@pytest.fixture
def notebook():
    """Run cells in an IPython shell of their own; gives its names."""
    shell = InteractiveShell(user_module=None)
    saved = sys.modules["__main__"]
    sys.modules["__main__"] = shell.user_module

    def run(*cells):
        for cell in cells:
            shell.run_cell(CELLS[cell], store_history=True).raise_error()
        return shell.user_ns

    yield run
    sys.modules["__main__"] = saved


def test_a_class_from_a_cell_lands_with_its_imports(notebook, tmp_path):
    text = script_text("mnist_ddp", [notebook("imports", "Net")["Net"]])
    assert parsed(text)["Net"] == ast.unparse(ast.parse(CELLS["Net"]).body[0])
    head = text.partition("def main")[0].splitlines()
    assert {"import numpy as np", "from math import floor", "from math import tau as turn", "import torch.fx"} <= {
        *head
    }
    assert [line for line in head if line.endswith("as F")] == ["import torch.nn.functional as F"], "it has its F"
    own = script_text("mnist_ddp", [notebook("Based")["Net"], notebook("Based")["Base"]])
    assert list(parsed(own)).index("Base") < list(parsed(own)).index("Net")


REFUSED = {
    "a value of the notebook": (("imports", "Outside"), "Net", "Net uses width"),
    "another F": (("imports", "another F", "Net"), "Net", "Net uses F"),
    "another class": (("imports", "Based"), "Net", "Net uses Base"),
    "what is nowhere": (("imports", "Missing"), "make_optimizer", "make_optimizer uses nowhere"),
    "a part of the script by another": (("imports", "a part", "Uses"), "make_optimizer", "make_optimizer uses train"),
    "no source": (("imports", "NoMethod"), "Net", "Net has no source"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_stand_in_the_script_is_refused_by_name(case, notebook, tmp_path):
    cells, name, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        write_script("mnist_ddp", tmp_path / "own.py", replace=[notebook(*cells)[name]])
    assert not list(tmp_path.iterdir())


def test_a_part_that_the_script_does_not_have_is_refused():
    with pytest.raises(ValueError, match="simple_ddp has no part called Net"):
        script_text("simple_ddp", [own_parts.Net])


# ---- the file


def test_another_text_is_kept_and_the_same_is_not(tmp_path):
    path = write_script("mnist_ddp", tmp_path / "mine.py")
    write_script("mnist_ddp", path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
    path.write_text("edited by hand")
    write_script("mnist_ddp", path, replace=own_parts.PARTS)
    assert (tmp_path / "mine.py.old").read_text() == "edited by hand" and "Block" in path.read_text()


def test_a_link_leads_to_the_file_and_dash_is_stdout(tmp_path, capsys):
    (tmp_path / "link.py").symlink_to(tmp_path / "file.py")
    write_script("simple_ddp", tmp_path / "link.py")
    assert (tmp_path / "link.py").is_symlink() and (tmp_path / "file.py").read_text() == script_text("simple_ddp")
    assert main(["script", "simple_ddp", "-"]) == 0
    assert capsys.readouterr().out == script_text("simple_ddp")


@pytest.mark.parametrize("path", ["folder", "file/mine.py"])
def test_a_path_that_cannot_be_written_is_named_and_nothing_changes(path, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    refused(write_script, "mnist_ddp", tmp_path / path, named=[str(tmp_path / path), "another path"])
    refused(write_script, "mnist_dpp", tmp_path / "x.py", named=["'mnist_dpp'", "mnist_ddp"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]
