"""Written-out scripts: standalone, clean, read from the top, and with the learner's own parts in them."""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import coloured
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from real import LIMIT, python
from refusals import ended, refused

from ddp_helpers import ROOT, __version__
from ddp_helpers.__main__ import main
from ddp_helpers.draw.show import functions
from ddp_helpers.launch import scripts
from ddp_helpers.launch.scripts import FOLDER, NAMES, write_script
from ddp_helpers.upkeep.written import FOLDER as COMMITTED

WIDEST = 100  # characters of a line that people read on a code host

# Run each script in turn where ddp_helpers cannot be imported, though this environment has it.
STANDALONE = """
import io, json, os, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
sys.modules["ddp_helpers"] = None
try:
    import ddp_helpers
except ImportError:
    said = []
    for path, env in json.loads(sys.argv[1]):
        os.environ |= env
        sys.argv, status = [path, "--help"], 0
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as end:
                status = end.code or 0
        said.append([status, out.getvalue(), err.getvalue()])
    print(json.dumps(said))
else:
    sys.exit("ddp_helpers can be imported: this run proves nothing")
"""


def ruff(*args):
    """Ruff with the settings of this project; what it finds, and '' if that is nothing."""
    options = ["--config", ROOT / "pyproject.toml", f"--line-length={WIDEST}", "--no-cache"]
    done = python("-m", "ruff", *args, *options)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_scripts_run_where_the_helpers_are_not(tmp_path):
    paths = {name: write_script(name, tmp_path / f"{name}.py") for name in NAMES}
    for path in paths.values():
        tree = ast.walk(ast.parse(path.read_text()))
        assert not [n for n in tree if isinstance(n, ast.Import | ast.ImportFrom) and "ddp_helpers" in ast.dump(n)]
    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""}
    todo = [*((str(path), {}) for path in paths.values()), (str(paths["simple_ddp"]), two)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = python("-P", "-s", "-c", STANDALONE, json.dumps(todo), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    *said, (ended_with, _, line) = json.loads(done.stdout)  # the last begins, and says who it is
    for name, (status, out, err) in zip(paths, said, strict=True):  # simple_ddp has no flags, and here no launcher
        known = "all 1 ranks hold the same model\n" if name == "simple_ddp" else "--data"
        assert status == 0 and known in out and not err, name
    ended(ended_with, "", line, "MASTER_ADDR", "MASTER_PORT")
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())


def test_scripts_are_clean_and_narrow(tmp_path):
    for name in NAMES:
        text = write_script(name, tmp_path / f"{name}.py").read_text()
        assert max(map(len, text.splitlines())) <= WIDEST, name
    assert ruff("check", tmp_path) == ""
    assert ruff("format", "--check", tmp_path) == ""


def test_the_committed_scripts_are_what_is_written_now(tmp_path):
    assert sorted(path.name for path in COMMITTED.glob("*.py")) == [f"{name}.py" for name in NAMES], "run: make scripts"
    for name in NAMES:
        written = write_script(name, tmp_path / f"{name}.py").read_bytes()
        assert (COMMITTED / f"{name}.py").read_bytes() == written, f"slurm/scripts/{name}.py is old: run: make scripts"


BLOCKS = (ast.FunctionDef, ast.ClassDef)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_begins_with_its_own_functions_then_what_one_replaces_then_the_rest(name, tmp_path):
    text = write_script(name, tmp_path / f"{name}.py").read_text()
    body, lines = ast.parse(text).body, text.splitlines()
    own = [node.name for node in ast.parse((FOLDER / f"{name}.py").read_text()).body if isinstance(node, BLOCKS)]
    blocks = [node for node in body if isinstance(node, BLOCKS)]
    names = [node.name for node in blocks]
    assert set(names[: len(own)]) == set(own) and names[: 1 + ("train" in own)] == [
        part for part in ("train", "main") if part in own
    ]
    marks = [number for number, line in enumerate(lines, 1) if line.startswith("# YOUR ")]
    replaced = [min(node.name for node in blocks if node.lineno > mark and node.lineno < mark + 9) for mark in marks]
    assert names[len(own) : len(own) + len(marks)] == replaced
    assert isinstance(body[-1], ast.If) and lines[-1].startswith("# ")


def test_a_script_says_what_it_was_made_from_and_how_to_launch_it(tmp_path):
    text = write_script("mnist_ddp", tmp_path / "mnist_ddp.py").read_text()
    top = ast.get_docstring(ast.parse(text))
    assert f"ddp_helpers {__version__}" in top and "torchrun --standalone" in top
    assert re.search(r'env\["made_from"\] = "(.*)"', text)[1] == f"ddp_helpers {__version__}"


def first_screen(text):
    """`train` and `main`, with their comments."""
    return functions(text, ["train", "main"]).lower()


def names_in(text):
    """All names in the code of a script."""
    return {getattr(node, "id", getattr(node, "arg", "")) for node in ast.walk(ast.parse(text))}


def test_mnist_single_knows_of_no_ranks(tmp_path):
    single, ddp = (write_script(name, tmp_path / name).read_text() for name in ("mnist_single", "mnist_ddp"))
    shown, names = ([of(text) for text in (single, ddp)] for of in (first_screen, names_in))  # helpers' comments may
    assert "distributed" not in single and not re.search(r"\branks?\b", shown[0]) and "rank" not in names[0]
    assert "distributed" in ddp and re.search(r"\branks?\b", shown[1]) and "rank" in names[1], "the control"


def test_two_writes_give_the_same_bytes(tmp_path):
    code = "import sys; from ddp_helpers.launch.scripts import NAMES, write_script\n"
    code += "for name in NAMES: write_script(name, f'{sys.argv[1]}/{name}.py')"
    for seed in "12":  # of Python's hashes: sets come in another order
        done = python("-c", code, tmp_path / seed, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.returncode == 0, done.stderr
    for name in NAMES:
        one, two = ((tmp_path / seed / f"{name}.py").read_bytes() for seed in "12")
        assert one == two and one


TRIED = {  # modules of a package of their own: what Python needs to have when it comes to a definition
    "parts": """
        SMALL = 3


        def first():
            return SMALL


        TABLE = {"first": first}


        class Base:
            size = 1


        class Later:
            pass


        def marked(function):
            return lambda: function() + first()
        """,
    "scripts.tried": """
        \"\"\"Try it.\"\"\"

        from ddp_helpers_tried.parts import TABLE, Base, Later, marked

        LIMIT = TABLE["first"]()


        class Own(Base):
            size = Base.size + LIMIT


        def kept(own: Own, later: Later = None) -> int:
            return own.size


        @marked
        def train(own=Own()) -> int:
            return kept(own)


        def main() -> None:
            print(train())


        if __name__ == "__main__":
            main()
        """,
}


def test_what_a_definition_needs_stands_before_it(tmp_path, monkeypatch):
    for name, text in TRIED.items():
        path = tmp_path / "ddp_helpers_tried" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).strip())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(scripts, "PACKAGE", "ddp_helpers_tried.scripts")
    (tmp_path / "tried.py").write_text(text := scripts.Script("tried").text())
    done = python(tmp_path / "tried.py", cwd="/")
    assert (done.stdout, done.stderr) == ("7\n", "")
    places = [text.index(part) for part in ("class Own(", "def train(", "def main(", "def kept(", "class Later")]
    assert places == sorted(places), "the control: what only a call or an annotation needs comes later"


def test_a_script_is_written_by_a_python_that_has_nothing_installed(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    bare = {"cwd": ROOT, "env": env}
    for module in ("torch", "matplotlib", "nbformat"):
        assert "ModuleNotFoundError" in python("-S", "-c", f"import {module}", **bare).stderr, "this proves nothing"
    for name in NAMES:
        done = python("-S", "-m", "ddp_helpers", "script", name, tmp_path / f"{name}.py", **bare)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / f"{name}.py").read_bytes() == (COMMITTED / f"{name}.py").read_bytes()


# ---- the learner's own Net

LEARNER = '''
import math
import torch
import torch.nn.functional as F
from torch import nn, relu
from torch.nn.functional import max_pool2d as pool

x = torch.zeros(3)  # not the x of forward


def mark(thing):
    return thing


class Net(nn.Module):
    """One layer of my own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(196, 10)

    def forward(self, x):
        """All that is imported above is needed here."""
        x = relu(pool(x, 2)) / math.sqrt(4)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


class Needs(nn.Module):
    """A class that asks for what only its module has."""

    def forward(self, x):
        """Asks."""
        return x * NEEDED


class Other(nn.Module):
    """A class that no script has."""

    def forward(self, x):
        """Nothing."""
        return x
'''


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """Import a module that stands for what a learner wrote, and give it."""

    def load(text=LEARNER):
        name = f"learner_{tmp_path.name}"
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "modules")
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)  # taken out again at the end
        return module

    return load


@pytest.mark.parametrize("name", ["mnist_single", "mnist_ddp"])
def test_the_learners_net_is_in_the_script_with_its_imports(name, learner, tmp_path):
    path = write_script(name, tmp_path / "script.py", replace=[learner().Net])
    text = path.read_text()
    assert "One layer of my own." in text and "nn.Dropout" not in text
    assert text.count("class Net(") == 1
    assert ruff("check", path) == "" and ruff("format", "--check", path) == ""
    theirs = runpy.run_path(str(path))["Net"]()
    assert theirs(torch.ones(2, 1, 28, 28)).shape == (2, 10)


NEEDS_SUBMODULE = '''
import importlib.metadata
import torch.distributed.nn
import torch.utils.dlpack
from torch import nn


class Net(nn.Module):
    """It uses two of the three."""

    def __init__(self) -> None:
        super().__init__()
        self.version = importlib.metadata.version("torch")
        self.gather = torch.distributed.nn.all_gather
'''


def test_a_submodule_is_imported_by_the_name_under_which_it_is_used(learner, tmp_path):
    path = write_script("mnist_single", tmp_path / "script.py", replace=[learner(NEEDS_SUBMODULE).Net])
    assert ruff("check", path) == ""
    lines = path.read_text().splitlines()
    assert "import importlib.metadata" in lines and "import torch.distributed.nn" in lines
    assert "import importlib" not in lines, "it would bring no metadata with it, and is not needed beside it"
    assert "import torch.utils.dlpack" not in lines, "the Net does not use it"


# A library that keeps its parts in a private module, as pathlib does since Python 3.13, and a learner that uses it.
PUBLIC, PRIVATE = "from library._parts import Part\n", "class Part:\n    def __init__(self):\n        pass\n"
NEEDS_PART = """
{}
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
"""


@pytest.mark.parametrize("line", ["from library import Part", "from library import *"])
def test_an_import_is_taken_as_the_source_says_it_not_from_where_a_library_keeps_it(
    line, learner, tmp_path, monkeypatch
):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text(PUBLIC)
    (tmp_path / "library" / "_parts.py").write_text(PRIVATE)
    monkeypatch.syspath_prepend(tmp_path)
    module = learner(NEEDS_PART.format(line))
    for name in ("library", "library._parts"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # taken out again at the end
    text = write_script("mnist_single", tmp_path / "script.py", replace=[module.Net]).read_text()
    assert "\nfrom library import Part\n" in text and "_parts" not in text


@pytest.mark.parametrize("name", ["mnist_single", "mnist_ddp", "mnist_ddp_resumable"])
def test_two_classes_and_the_learners_data_and_loss_are_in_the_script_once(name, tmp_path):
    path = write_script(name, tmp_path / "script.py", replace=coloured.PARTS)
    text, course = path.read_text(), write_script(name, tmp_path / "course.py").read_text()
    for gone in ("MNIST(", "Normalize", "F.nll_loss", "nn.Dropout"):
        assert gone not in text and gone in course
    for part in ("class Block(", "class Net(", "def datasets(", "def loss_and_metrics("):
        assert text.count(part) == 1, part
    assert ruff("check", path) == "" and ruff("format", "--check", path) == ""
    theirs = runpy.run_path(str(path))
    assert theirs["Net"]()(torch.ones(2, 3, 32, 32)).shape == (2, 10)
    assert [len(each) for each in theirs["datasets"](tmp_path)] == [512, 201]


RELATED = """
import functools
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset


class Base(nn.Module):
    def width(self):
        return 10


class Net(Base):
    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(4, self.width())


class Points(Dataset):
    def __len__(self):
        return 6


class Few(Points):
    def __len__(self):
        return Base().width() // 5


def datasets(folder) -> tuple[Points, Few]:
    return Points(), Few()


def factor():
    return 2.0


def scaled(function):
    by = factor()
    return functools.wraps(function)(lambda *args: (by * function(*args)[0], function(*args)[1]))


@scaled
def loss_and_metrics(output, target):
    return cross_entropy(output, target), {"accuracy": (output.argmax(dim=1) == target).sum()}
"""


def test_a_learners_classes_stand_before_those_that_are_made_of_them(learner, tmp_path):
    module = learner(RELATED)
    names = ["Net", "datasets", "loss_and_metrics", "Few", "scaled", "Points", "Base", "factor"]
    for order in (names, names[::-1], sorted(names)):
        text = write_script("mnist_ddp", tmp_path / "mine.py", [getattr(module, name) for name in order]).read_text()
        assert [len(re.findall(rf"^(class|def) {name}\b", text, re.M)) for name in names] == [1] * len(names)
        assert ruff("check", "--select=E,F,I", tmp_path / "mine.py") == "" and "\ndef train(" in text
        theirs = runpy.run_path(str(tmp_path / "mine.py"))
    assert theirs["Net"]().fc.out_features == 10 and [*map(len, theirs["datasets"](tmp_path))] == [6, 2]
    loss, metrics = theirs["loss_and_metrics"](torch.zeros(1, 2), torch.zeros(1).long())
    assert (round(loss.item(), 3), metrics["accuracy"].item()) == (1.386, 1)


def test_a_class_that_the_net_needs_must_be_given_too(tmp_path):
    with pytest.raises(ValueError, match=r"^Net\b.*\bBlock\b.*\binside Net\b"):
        write_script("mnist_single", tmp_path / "script.py", replace=[coloured.Net])
    with pytest.raises(ValueError, match=r"replace=\['Block'\]: mnist_single "):
        write_script("mnist_single", tmp_path / "script.py", replace=[coloured.Block])


NEEDED = {  # what stands for NEEDED in the learner's module
    "a number": "NEEDED = 3",
    "a tensor": "NEEDED = torch.ones(1)",
    "a layer": "NEEDED = nn.Linear(1, 1)",
    "a device": "NEEDED = torch.device('cpu')",
    "a function": "def NEEDED(): pass",
    "a class": "class NEEDED: pass",
    "a lambda": "NEEDED = lambda: 3",
    "a helper": "from ddp_helpers.rank.training import has_bf16 as NEEDED",
    "a helper module": "from ddp_helpers.rank import model as NEEDED",
    "the class that it replaces": "from ddp_helpers.rank.model import Net as NEEDED",
}


@pytest.mark.parametrize("what", NEEDED)
def test_a_net_that_needs_what_only_the_notebook_has_is_refused(what, learner, tmp_path):
    module = learner(LEARNER.replace("class Needs(", "class Spare(").replace("class Net(", "class Whole("))
    text = f"{LEARNER.partition('class Net')[0]}\n{NEEDED[what]}\n\n\nclass Net{LEARNER.partition('class Needs')[2]}"
    exec(compile(text, module.__file__, "exec"), vars(module))
    Path(module.__file__).write_text(text)
    with pytest.raises(ValueError, match=r"^Net\b.*\bNEEDED\b.*\binside Net\b"):
        write_script("mnist_single", tmp_path / "script.py", replace=[module.Net])
    assert not (tmp_path / "script.py").exists()


def test_a_class_without_a_place_or_a_source_is_refused(learner, tmp_path):
    module = learner()
    with pytest.raises(ValueError, match=r"replace=\['Other'\]: mnist_single "):
        write_script("mnist_single", tmp_path / "script.py", replace=[module.Other])
    with pytest.raises(ValueError, match=r"replace=\['Net'\]: download_data "):
        write_script("download_data", tmp_path / "script.py", replace=[module.Net])
    exec("class Net:\n    def forward(self): pass", space := {"__name__": module.__name__})
    with pytest.raises(ValueError, match=r"^Net "):
        write_script("mnist_single", tmp_path / "script.py", replace=[space["Net"]])
    assert not (tmp_path / "script.py").exists()


CELLS = [
    "import torch.nn.functional as F\nfrom torch import nn\nfrom ddp_helpers.launch import scripts\nx = 3",
    "class Net(nn.Module):\n    def forward(self, x):\n        return F.relu(x)  # the first try",
    "%time y = 5\nfrom pathlib import Path as Place",
    "%time y = 5\nclass Net(nn.Module):\n    def forward(self, x):\n        return F.relu(x), Place  # the second try",
    "text = scripts.write_script('mnist_single', 'script.py', replace=[Net]).read_text()\n"
    "print(text.count('the first try'), text.count('the second try'), text.count('nn.Dropout'))\n"
    "print(*[line for line in text.splitlines() if 'pathlib' in line], sep='\\n')",
]


def test_a_net_from_a_notebook_cell_is_in_the_script_as_it_was_last_defined(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert notebook.cells[-1].outputs[0].text == "0 1 0\nfrom pathlib import Path, Path as Place\n"


# ---- paths, and the command line


@pytest.mark.parametrize("path", ["file/script.py", "folder", ".", "file/"])
def test_a_path_that_cannot_be_written_stops_and_leaves_nothing(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("folder").mkdir()
    if path == "file/":  # a path that ends in / is that of a file all the same: pathlib drops it
        path = "file/below/script.py"
    refused(write_script, "simple_ddp", path, named=[path])
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file", tmp_path / "folder"]
    assert Path("file").read_text() == "mine"


def test_a_script_that_was_edited_is_kept_unless_it_is_to_go(tmp_path):
    path, words = tmp_path / "mine.py", ["script", "simple_ddp", str(tmp_path / "mine.py")]
    path.touch()  # nothing is lost with an empty file
    assert main(words) == 0
    first = path.read_text()
    assert main(["script", "mnist_single", str(path)]) == 0, "one that nobody has edited may go"
    assert main(words) == 0 and path.read_text() == first
    for text in ("precious\n", f"{first}# mine\n", first.replace("Linear(42, 3)", "Linear(42, 4)"), first[:-20]):
        path.write_text(text)
        refused(main, words, named=[str(path), "--force"])
        assert path.read_text() == text
    assert main([*words, "--force"]) == 0 and path.read_text() == first
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]


def test_no_link_is_followed_and_none_is_replaced(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "x.py"
    victim.write_text("theirs")
    (tmp_path / "x.py.part").symlink_to(victim)  # the name that half a file once had
    write_script("simple_ddp", path)
    assert victim.read_text() == "theirs" and path.is_file() and not path.is_symlink()
    for target in (victim, path, tmp_path / "nowhere"):
        (tmp_path / "link.py").symlink_to(target)
        for more in ([], ["--force"]):
            refused(main, ["script", "simple_ddp", str(tmp_path / "link.py"), *more], named=["link.py"])
        (tmp_path / "link.py").unlink()
    assert victim.read_text() == "theirs" and not (tmp_path / "nowhere").exists()


def test_an_output_gets_the_text_and_stays_what_it_is(tmp_path):
    plain = write_script("simple_ddp", tmp_path / "plain.py").read_bytes()
    command = [sys.executable, "-m", "ddp_helpers", "script", "simple_ddp"]
    how = {"cwd": tmp_path, "capture_output": True, "timeout": LIMIT, "check": False}
    done = subprocess.run([*command, "/dev/stdout"], **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, plain, b"")
    words = shlex.join(command)
    line = f"{words} /dev/stdout >kept.py && test -L /dev/stdout && {words} /dev/null"
    done = subprocess.run(["bash", "-c", line], **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "kept.py").read_bytes() == plain and Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(["bash", "-c", f"cat pipe >read.py & {words} pipe && wait"], **how)
    assert done.returncode == 0 and (tmp_path / "read.py").read_bytes() == plain and (tmp_path / "pipe").is_fifo()
    done = subprocess.run([*command, "/dev/full"], **how)
    ended(done.returncode, done.stdout.decode(), done.stderr.decode(), "No space left")
    assert Path("/dev/full").is_char_device()


ODD = [
    "a b",
    "it's",
    'a "b"',
    "$(touch canary)",
    "`touch canary`",
    "a; touch canary",
    "back\\slash",
    "two\nlines",
    "-rf",
    "ü",
]


@pytest.mark.parametrize("name", ODD)
def test_odd_paths_work_and_run_nothing(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = write_script("simple_ddp", "plain.py").read_bytes()
    assert main(["script", "simple_ddp", f"./{name}/{name}.py"]) == 0
    assert capsys.readouterr().out == f"wrote {name}/{name}.py\n"
    assert Path(name, f"{name}.py").read_bytes() == plain
    assert {path.name for path in tmp_path.iterdir()} == {name, "plain.py"}
    Path("file").touch()
    refused(write_script, "simple_ddp", f"file/{name}", named=["file"])


def test_the_command_line_as_a_shell_runs_it(tmp_path):
    name = 'it\'s; touch canary; $(touch canary) "`touch canary`" \\ \n.py'
    command = [sys.executable, "-m", "ddp_helpers", "script", "mnist_ddp", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {name}\n", "")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    compile((tmp_path / name).read_text(), name, "exec")
