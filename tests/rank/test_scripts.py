"""write_script: the same bytes as the module, or with a learner's own parts in their place; nothing lost."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import own_parts
import pytest
from changed_text import replaced
from real import python, without_helpers
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.rank.scripts import NAMES, script_text, write_script
from ddp_tools import PlainError


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
    code = "from ddp_helpers.rank.scripts import NAMES, write_script\nfor name in NAMES: write_script(name, name)"
    command = [sys.executable, "-S", "-c", code]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: script_text(name) for name in NAMES}


# ---- a learner's own parts


def test_own_parts_stand_in_the_place_of_the_scripts():
    before, after = parsed(script_text("mnist_ddp")), parsed(script_text("mnist_ddp", own_parts.__file__))
    own = parsed(Path(own_parts.__file__).read_text())
    assert after == before | own and {*own} == {"Net", "Block", "datasets", "loss_and_metrics"}


OWN = """\"\"\"A file of mine.\"\"\"

from math import tau

import numpy as np
import torch
from torch import nn

width = 3


class Net(nn.Module):  # mine
    def forward(self, x):
        return torch.relu(x) * width * tau * np.pi


def main():
    print(Net())


if __name__ == "__main__":
    main()
"""


def test_a_file_lands_with_its_imports_and_without_its_main(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    text = script_text("mnist_ddp", tmp_path / "own.py")
    assert parsed(text)["main"] == parsed(script_text("mnist_ddp"))["main"]
    assert text.count("class Net") == 1 and "class Net(nn.Module):  # mine" in text and "A file of mine" not in text
    assert all(line in text for line in ("from math import tau", "import numpy as np", "width = 3"))
    assert text.index("import numpy as np") < text.index("class Net") < text.index("def main")
    compile(text, "own", "exec")


REFUSED = {
    "another F": (("import torch\n", "import torch.fft as F\n"), "F is torch.fft in it, and torch.nn.functional"),
    "a helper": (("import torch\n", "from ddp_helpers import ROOT\n"), "it imports ROOT from the course"),
    "no part": (("class Net", "class Network"), "it defines none of"),
    "no Python": (("class Net", "class class"), "invalid syntax"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_stand_in_the_script_is_refused_by_name(case, tmp_path):
    change, says = REFUSED[case]
    (tmp_path / "own.py").write_text(replaced(OWN, [change]))
    with pytest.raises(PlainError, match=f"own.py cannot be used in mnist_ddp: {says}"):
        write_script("mnist_ddp", tmp_path / "new.py", tmp_path / "own.py")
    assert not (tmp_path / "new.py").exists()


# ---- the file


def test_another_text_is_kept_and_the_same_is_not(tmp_path):
    path = write_script("mnist_ddp", tmp_path / "mine.py")
    write_script("mnist_ddp", path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
    path.write_text("edited by hand")
    write_script("mnist_ddp", path, parts=own_parts.__file__)
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
