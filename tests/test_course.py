"""The executor behind `make run` says what ran and where the figures are, and fails if a cell fails; what is stale."""

import json
import re
import shutil
import signal
import subprocess
import sys

import jupyter_client
import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from real import until

from ddp_helpers import ROOT
from ddp_helpers.notebook.kernels import KernelOnFiles
from ddp_helpers.notebook.parameters import execute
from ddp_helpers.upkeep import course, slides, stale

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
FIGURE = "from ddp_helpers.lessons import shard_the_data\nshard_the_data.global_batch(8, 2)"


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """An empty course, and where it is built."""
    monkeypatch.setattr(course, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(course, "BUILD", tmp_path / "build")
    monkeypatch.setattr(course, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks"


def test_a_good_notebook(notebooks, capsys):
    nbformat.write(new_notebook(cells=[new_code_cell(FIGURE)]), notebooks / "01_good.ipynb")
    assert course.run([], in_place=False) == 0
    said = capsys.readouterr().out
    assert "1/1 cells" in said and "build/figures/01_good_1..1.png" in said
    assert (notebooks.parent / "build" / "figures" / "01_good_1.png").read_bytes().startswith(b"\x89PNG")
    executed = nbformat.read(notebooks.parent / "build" / "notebooks" / "01_good.ipynb", 4)
    assert executed.metadata.made_from == course.digest(executed)
    assert nbformat.read(notebooks / "01_good.ipynb", 4).cells[0].outputs == []  # not in place


def test_a_failing_notebook_fails_the_course_and_is_named(notebooks, capsys):
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0"), new_code_cell("1")]), notebooks / "01_bad.ipynb")
    assert course.run([], in_place=True) == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out and "01_bad" in err and "ZeroDivisionError" in err
    assert nbformat.read(notebooks / "01_bad.ipynb", 4).cells[0].outputs[-1].ename == "ZeroDivisionError"


LISTENS = """import json
from pathlib import Path
from ipykernel.connect import get_connection_file
told = json.loads(Path(get_connection_file()).read_text())
files = [Path(f"{told['ip']}-{number}") for name, number in told.items() if name.endswith("_port")]
print(told["transport"], [file.is_socket() for file in files])"""


def test_no_kernel_listens_on_a_port_that_a_rank_could_take_before_it(notebooks, monkeypatch):
    path = notebooks / "01_listens.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(LISTENS)], metadata=KERNEL), path)
    NotebookClient(as_nbmake := nbformat.read(path, 4)).execute()
    monkeypatch.setattr(jupyter_client, "AsyncKernelManager", KernelOnFiles.__base__)  # conftest's is for tests alone
    execute(path, notebooks / "papermill.ipynb")
    assert course.run(["01"], in_place=True) == 0
    for executed in (as_nbmake, *(nbformat.read(notebooks / name, 4) for name in ("papermill.ipynb", path.name))):
        assert executed.cells[-1].outputs[0].text == f"ipc {[True] * 5}\n"


def test_slides_have_a_page_for_each_figure_under_its_section(notebooks, monkeypatch):
    cells = [new_markdown_cell("# Good\n\n## Shards"), new_code_cell(FIGURE), new_markdown_cell("## Next")]
    nbformat.write(new_notebook(cells=[*cells, new_code_cell(FIGURE)]), notebooks / "01_good.ipynb")
    assert course.run([], in_place=True) == 0
    assert [section for section, _ in slides.pictures(notebooks / "01_good.ipynb")] == ["Shards", "Next"]
    monkeypatch.setattr(slides, "ROOT", notebooks.parent)
    assert slides.write(notebooks.parent / "slides.pdf") == 2
    assert (notebooks.parent / "slides.pdf").read_bytes().startswith(b"%PDF")


def test_no_such_notebook_is_a_failure(notebooks, capsys):
    with pytest.raises(SystemExit) as end:
        course.run(["42"], in_place=False)
    assert end.value.code == 2 and capsys.readouterr().err == "no notebook begins with 42: give numbers, such as 03\n"


WAITS = """# {jobs}
import pathlib, time
pathlib.Path("here_{own}").touch()
while not pathlib.Path("here_{other}").exists():
    time.sleep(0.1)"""


def test_a_notebook_that_sends_jobs_runs_beside_one_that_does_not(notebooks, capsys):
    for own, other, jobs in ((1, 2, "slurm.submit"), (2, 1, "")):  # each ends only while the other runs
        cell = new_code_cell(WAITS.format(own=own, other=other, jobs=jobs))
        nbformat.write(new_notebook(cells=[cell]), notebooks / f"0{own}_waits.ipynb")
    assert course.run([], in_place=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines if " ok " in line] == ["01_waits", "02_waits"]


def test_ctrl_c_ends_the_course_and_its_kernels(notebooks):
    cell = "import os, pathlib, time\npathlib.Path('part').write_text(str(os.getpid()))\nos.rename('part', 'pid')"
    nbformat.write(new_notebook(cells=[new_code_cell(f"{cell}\ntime.sleep(600)")]), notebooks / "01_long.ipynb")
    here = f"from pathlib import Path; from ddp_helpers.upkeep import course; here = Path({str(notebooks.parent)!r})"
    here += "; course.NOTEBOOKS, course.BUILD, course.ROOT = here / 'notebooks', here / 'build', here"
    with subprocess.Popen([sys.executable, "-c", f"{here}; course.run([], False)"], stderr=subprocess.PIPE) as started:
        until(lambda: (notebooks / "pid").exists(), "a kernel")
        started.send_signal(signal.SIGINT)
        assert re.fullmatch(r"stopped by Ctrl-C: .*\n", started.communicate()[1].decode())
    assert started.returncode == 1
    kernel = int((notebooks / "pid").read_text())
    until(lambda: not psutil.pid_exists(kernel), "its end")


FUNCTION = '"""A helper."""\n\n\ndef value():\n    """What it gives."""\n    return 1  # so far\n'
JOB = {"cells": [{"cell_type": "code", "source": "from ddp_helpers.rank import data", "metadata": {}, "outputs": []}]}
TREE = {
    "ddp_helpers/__init__.py": "",
    "ddp_helpers/rank/__init__.py": "",
    "ddp_helpers/rank/data.py": FUNCTION,
    "ddp_helpers/rank/model.py": FUNCTION,
    "ddp_helpers/rank/scripts/doctor.py": "from ddp_helpers.rank import model\n",
    "ddp_helpers/rank/scripts/simple.py": FUNCTION,
    "ddp_helpers/notebook/__init__.py": "",
    "ddp_helpers/notebook/plots/__init__.py": "value = 1\n",
    "ddp_helpers/notebook/plots/ladder.py": f"{FUNCTION}\n\nfrom .. import lazy\n",
    "ddp_helpers/notebook/lazy.py": "def value():\n    from ddp_helpers.rank import data\n",
    "ddp_helpers/notebook/ready.py": 'def value():\n    """Not simple."""\n    return write("doctor")\n',
    "ddp_helpers/notebook/process.py": 'command = ["-m", "ddp_helpers.notebook.lazy"]\n',
    "ddp_helpers/notebook/batch.py": 'TEMPLATE, SITES = "job.sbatch.jinja", ROOT / "slurm" / "sites"\n',
    "ddp_helpers/notebook/sweep.py": 'JOB = ROOT / "slurm" / "job.ipynb"\n',
    "slurm/job.sbatch.jinja": "#!/bin/bash\n",
    "slurm/job.ipynb": json.dumps(JOB | {"metadata": {}, "nbformat": 4, "nbformat_minor": 4}),
    "slurm/sites/local.toml": 'partition = "course"\n',
    "notebooks/results/README.md": "Records.\n",
    "notebooks/results/published.json": "{}\n",
    "notebooks/results/two_cores/run/spec.json": "{}\n",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small course, to be changed."""
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    return tmp_path


def change(file, old, new):
    """Replace text in a file that holds it."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def digest(*sources):
    """The digest of a notebook with these code cells."""
    return stale.digest(new_notebook(cells=[new_code_cell(source) for source in sources]))


REACHED = [  # by this cell, this file
    ("from ddp_helpers.notebook.plots import ladder", "notebook/plots/ladder.py"),
    ("from ddp_helpers.notebook.plots.ladder import value", "notebook/plots/ladder.py"),
    ("import ddp_helpers.notebook.plots.ladder as steps", "notebook/plots/__init__.py"),
    ("from ddp_helpers.notebook.plots.ladder import value", "rank/data.py"),  # through `from .. import lazy`
    ("def later():\n    from ddp_helpers.notebook import lazy", "rank/data.py"),
    ("x = 1\n%load_ext ddp_helpers.notebook.plots.ladder", "notebook/plots/ladder.py"),
    ("%%ranks 2 fails\nfrom ddp_helpers.rank import (\n    data,\n)", "rank/data.py"),
    ("files = !ls\nfrom ddp_helpers.rank import data", "rank/data.py"),
    ("%%bash\npython -c 'from ddp_helpers.rank import model, data' && echo", "rank/data.py"),
    ('head = f"""import os\nfrom ddp_helpers.rank import model, data\nx = {y}"""', "rank/data.py"),
    ("from ddp_helpers.notebook import process", "rank/data.py"),  # it starts a module by its name
    ('scripts.write("simple", "simple.py")', "rank/scripts/simple.py"),
    ('show.source(ROOT / "slurm" / "scripts" / "simple.py")', "rank/scripts/simple.py"),  # written out from it
    ('script = "doctor"', "rank/model.py"),
    ("from ddp_helpers.notebook.ready import value", "rank/model.py"),  # it writes the doctor
    ('execute("slurm/job.ipynb")', "rank/data.py"),
    ("!papermill ../slurm/job.ipynb out.ipynb", "rank/data.py"),
    ("%%bash\npapermill ../slurm/job.ipynb out.ipynb", "rank/data.py"),
    ("from ddp_helpers.notebook import sweep", "rank/data.py"),
]


@pytest.mark.parametrize(("cell", "path"), REACHED, ids=lambda value: value.splitlines()[-1])
def test_changed_code_makes_stale_what_reaches_it(tree, cell, path):
    before, other = digest(cell), digest("from ddp_helpers.notebook import batch")
    file = tree / "ddp_helpers" / path
    file.write_text(f"# A comment.\n\n{file.read_text()}\n\n# Another.\n")
    assert digest(cell) == before, "the control: a comment"
    file.write_text(f"{file.read_text()}added = 2\n")
    assert digest(cell) != before
    assert digest("from ddp_helpers.notebook import batch") == other, "the control: a notebook that does not reach it"


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        ("from ddp_helpers.notebook import batch", "slurm/job.sbatch.jinja"),
        ("from ddp_helpers.notebook import batch", "slurm/sites/local.toml"),
        ('show.source(ROOT / "slurm" / "sites" / "local.toml")', "slurm/sites/local.toml"),
        ('recorded = "notebooks/results/two_cores"', "notebooks/results/two_cores/run/spec.json"),
        ('table(ROOT / "notebooks" / "results" / "two_cores")', "notebooks/results/two_cores/run/spec.json"),
        ('(ROOT / "notebooks" / "results" / "published.json").read_text()', "notebooks/results/published.json"),
    ],
)
def test_changed_data_make_stale_what_names_them(tree, cell, path):
    cell += '\nabout = "notebooks/results/README.md"'
    before, other = digest(cell), digest("from ddp_helpers.notebook import sweep")
    change(tree / "notebooks" / "results" / "README.md", "Records", "All records")
    assert digest(cell) == before, "the control: the page about the records"
    (tree / path).write_text(f"{TREE[path]}# more\n")
    assert digest(cell) != before
    assert digest("from ddp_helpers.notebook import sweep") == other, "the control: a notebook that does not name it"


def test_a_new_site_makes_stale_what_names_it_and_nothing_else(tree):
    any_site, shows_it = "from ddp_helpers.notebook import batch", 'show.source(SITES / "karst.toml")'
    before = digest(any_site), digest(shows_it)
    (tree / "slurm" / "sites" / "karst.toml").write_text('partition = "gpu"\n')
    assert digest(any_site) == before[0] and digest(shows_it) != before[1]


@pytest.mark.parametrize(
    ("old", "new", "is_stale"),
    [
        ("  # so far", "", False),
        ('"""A helper."""', "# A helper.", False),
        ('    """What it gives."""\n', "", False),
        ("What it gives", "What the doctor gives", False),
        ("return 1", "\n    return (\n        0x1\n    )", False),
        ("return 1", "return 2", True),
        ("return 1", 'return "1"', True),
        ("value():", "value(*, x=None):", True),
    ],
)
def test_comments_docstrings_and_layout_of_a_helper_do_not_count(tree, old, new, is_stale):
    before = digest("from ddp_helpers.rank import data")
    change(tree / "ddp_helpers" / "rank" / "data.py", old, new)
    assert (digest("from ddp_helpers.rank import data") != before) == is_stale


@pytest.mark.parametrize(
    ("cell", "is_stale"),
    [
        ('epochs = 2  # passes over the data\n"said"', False),
        ('epochs = 2\n\n\n"said"', False),
        ('epochs = 3\n"said"', True),
        ('epochs = 2\n"told"', True),
        ('epochs = 2\n"said";', True),
        ('%%ranks 2\nepochs = 2\n"said"', True),
    ],
)
def test_a_changed_cell_makes_stale_and_a_comment_in_it_does_not(tree, cell, is_stale):
    assert (digest(cell) != digest('epochs = 2\n"said"')) == is_stale


def test_cells_that_python_cannot_read(tree):
    assert digest("%%bash\necho 'one'") != digest("%%bash\necho 'two'")
    assert digest("%%ranks 2\nx = 1") != digest("%%ranks 4\nx = 1")
    assert digest("%%ranks 2\nx = 1") == digest("%%ranks 2\n\nx = 1  # one")
    assert digest('"told"') != digest('"said"'), "what stands alone in a cell is shown, and no docstring"


def test_cells_in_another_order_or_split_make_stale_and_text_does_not(tree):
    assert len({digest("x = 1", "y = 2"), digest("y = 2", "x = 1"), digest("x = 1\ny = 2")}) == 3
    told = new_notebook(cells=[new_markdown_cell("Text"), new_code_cell("x = 1"), new_code_cell("y = 2")])
    assert stale.digest(told) == digest("x = 1", "y = 2")


def test_a_file_that_appears_or_goes_makes_stale(tree):
    before, other = digest('"two_cores"'), digest('"published.json"')
    extra = tree / "notebooks" / "results" / "two_cores" / "run2.json"
    extra.write_text("{}\n")
    assert digest('"two_cores"') != before and digest('"published.json"') == other
    extra.unlink()
    assert digest('"two_cores"') == before


def test_a_helper_of_the_real_course(tmp_path, monkeypatch):
    for part in ("ddp_helpers", "slurm", "notebooks"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "[0-9]*.ipynb"))
    first = nbformat.read(next((ROOT / "notebooks").glob("01_*.ipynb")), as_version=4)
    here = stale.digest(first)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    assert stale.digest(first) == here, "it depends on where the checkout is"
    helpers = tmp_path / "ddp_helpers"
    for path, added, is_stale in [
        ("rank/model.py", "# A comment.\n", False),
        ("notebook/slurm/site.py", "added = 1\n", False),  # 01 has no job
        ("rank/model.py", "added = 1\n", True),
    ]:
        (helpers / path).write_text((helpers / path).read_text() + added)
        assert (stale.digest(first) != here) == is_stale, path


@pytest.mark.parametrize(
    ("number", "paths"),
    [
        ("01", ["notebooks/results/recipes/fast-seed1/spec.json"]),
        ("07", ["slurm/job.sbatch.jinja", "slurm/sites/local.toml", "slurm/job.ipynb"]),
        ("08", ["slurm/job.sbatch.jinja", "slurm/job.ipynb", "ddp_helpers/rank/scripts/mnist_ddp.py"]),
        ("09", ["notebooks/results/two_cpu_cores/weak-1x1-cpus1-seed1/spec.json", "notebooks/results/published.json"]),
        ("10", ["ddp_helpers/rank/scripts/doctor.py", "ddp_helpers/rank/doctor/checks.py"]),
        ("13", ["notebooks/letters.py"]),
    ],
)
def test_what_the_real_notebooks_depend_on(number, paths):
    found = {}
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        found[path.stem[:2]] = stale.closure(stale.cells(nbformat.read(path, as_version=4))[1]).keys()
    assert set(paths) <= found[number]
    assert not set(paths) & found["05"], "the control: 05 has none of them"
