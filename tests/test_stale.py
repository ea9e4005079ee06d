"""A notebook is stale when its cells, or a file that it opened when it was executed, have changed; and only then."""

import shutil

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ddp_helpers import ROOT
from ddp_helpers.upkeep import course, stale

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
HELPER = '"""A helper."""\n\n\ndef value():\n    """What it gives."""\n    return 1  # so far\n'


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small course, to be changed."""
    for path in ("ddp_helpers/rank/digits.py", "ddp_helpers/lessons/plain.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(HELPER)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    return tmp_path


def executed(*sources, opened=()):
    """A notebook with these code cells, as it is after it was executed and has opened these files."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    notebook.metadata["made_from"] = stale.made_from(notebook, opened)
    return notebook


# What kernels do: read by itself, by a module's import, by a program, by a rank that a program starts, by a list.
READS = {
    "ddp_helpers/rank/digits.py": "from ddp_helpers.rank import digits",
    "notebooks/spirals.py": "import subprocess, sys\nsubprocess.run([sys.executable, '../notebooks/spirals.py', '-h'])",
    "notebooks/spirals_ddp.py": '!"{sys.executable}" -m torch.distributed.run --standalone --local-addr localhost '
    "../notebooks/spirals_ddp.py --epochs 1",
    "slurm/job.sbatch.jinja": "from pathlib import Path\ntext = Path('../slurm/job.sbatch.jinja').read_text()",
    "notebooks/results/recipes": "import os\nnames = os.listdir('../notebooks/results/recipes')",
}


def test_what_a_kernel_and_all_that_it_starts_open_is_noted(tmp_path):
    path = tmp_path / "01_reads.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in READS.values()]), path)
    assert course.execute(path, path).error == ""
    notebook = nbformat.read(path, as_version=4)
    assert READS.keys() <= notebook.metadata.made_from.keys()
    assert "ddp_helpers/rank/scripts/doctor.py" not in notebook.metadata.made_from, "the control: nobody opened it"
    assert not any(name.startswith((".", "build", "runs")) for name in notebook.metadata.made_from)
    assert stale.changed(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_each_file_that_a_notebook_opened_makes_it_stale(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    for name in notebook.metadata.made_from.keys() - {stale.CELLS}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    assert stale.changed(notebook) == [], "it depends on where the checkout is"
    for name in notebook.metadata.made_from.keys() - {stale.CELLS}:
        file = tmp_path / name
        if file.is_dir():
            (file / "another").touch()
            assert stale.changed(notebook) == [name]
            (file / "another").unlink()
            inner = next(each for each in file.rglob("*.json*"))
            text = inner.read_bytes()
            inner.write_bytes(text + b" ")
            assert stale.changed(notebook) == [name]
            inner.write_bytes(text)
        else:
            text = file.read_bytes()
            file.write_bytes(text.replace(b'"nbformat": 4', b'"nbformat": 4 ') + b"\nadded = 1\n")
            if file.suffix != ".ipynb":
                assert stale.changed(notebook) == [name]
            file.write_bytes(text)


def test_what_the_real_notebooks_start_and_show_is_among_what_they_were_made_from():
    opened = {path.stem[:2]: nbformat.read(path, as_version=4).metadata.made_from.keys() for path in NOTEBOOKS}
    assert {"notebooks/spirals.py", "notebooks/spirals_ddp.py"} <= opened["06"]
    assert {"slurm/sites/greene.toml", "slurm/sites/local.toml"} <= opened["07"]
    assert {"slurm/job.ipynb", "slurm/job.sbatch.jinja", "ddp_helpers/rank/scripts/mnist_ddp.py"} <= opened["08"]
    assert {"notebooks/results/published.json", "notebooks/results/two_cpu_cores"} <= opened["09"]
    assert not any(name.startswith("slurm/") for name in opened["05"]), "the control: 05 has no job"


def test_a_new_site_and_a_new_launcher_make_nothing_stale_but_what_shows_the_table(tree):
    launchers = tree / "ddp_helpers" / "rank" / "launchers.py"
    launchers.write_text('LAUNCHERS = {"torchrun": ("RANK",)}\n\n\ndef who_am_i():\n    return 0\n')
    (tree / "slurm" / "sites").mkdir(parents=True)
    opened = ["ddp_helpers/rank/launchers.py", "ddp_helpers/lessons/plain.py"]
    starts, shows = executed("x = 1", opened=opened), executed("print(LAUNCHERS)", opened=opened)
    (tree / "slurm" / "sites" / "karst.toml").write_text('partition = "gpu"\n')
    assert stale.changed(starts) == stale.changed(shows) == []
    launchers.write_text(launchers.read_text().replace("}", ', "flux": ("FLUX_TASK_RANK",)}'))
    assert (stale.changed(starts), stale.changed(shows)) == ([], opened[:1])
    launchers.write_text(launchers.read_text().replace("return 0", "return 1"))
    assert stale.changed(starts) == opened[:1]


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("  # so far", "", False),
        ('"""A helper."""', "# A helper.", False),
        ('    """What it gives."""\n', "", False),
        ("return 1", "\n    return (\n        0x1\n    )", False),
        ("return 1", "return 2", True),
        ("return 1", 'return "1"', True),
        ("value():", "value(*, x=None):", True),
    ],
)
def test_comments_docstrings_and_layout_of_a_helper_do_not_count(tree, old, new, counts):
    path = "ddp_helpers/rank/digits.py"
    notebook = executed("from ddp_helpers.rank import digits", opened=[path])
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))
    assert stale.changed(notebook) == [path] * counts


def test_a_file_that_goes_makes_stale(tree):
    path = "ddp_helpers/rank/digits.py"
    notebook = executed("1", opened=[path])
    (tree / path).unlink()
    assert stale.changed(notebook) == [path]


def test_a_notebook_that_was_never_executed_is_stale():
    assert stale.changed(new_notebook(cells=[new_code_cell("1")])) == [stale.CELLS]


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        (['x = 2\n"said"'], ['x = 2  # twice\n"said"'], False),
        (['x = 2\n"said"'], ['x = 2\n\n\n"said"'], False),
        (['x = 2\n"said"'], ['x = 3\n"said"'], True),
        (['x = 2\n"said"'], ['x = 2\n"told"'], True),  # what stands alone in a cell is shown, and no docstring
        (['x = 2\n"said"'], ['x = 2\n"said";'], True),
        (['x = 2\n"said"'], ['%%ranks 2\nx = 2\n"said"'], True),
        (["%%bash\necho 'a'"], ["%%bash\necho 'b'"], True),
        (["%%ranks 2\nx = 1"], ["%%ranks 4\nx = 1"], True),
        (["%%ranks 2\nx = 1"], ["%%ranks 2\n\nx = 1  # again"], False),
        (["x = 1", "y = 2"], ["y = 2", "x = 1"], True),
        (["x = 1", "y = 2"], ["x = 1\ny = 2"], True),
    ],
)
def test_a_changed_cell_makes_stale_and_a_comment_in_it_does_not(old, new, counts):
    notebook = executed(*old)
    notebook.cells = [new_markdown_cell("Text"), *(new_code_cell(source) for source in new)]
    assert stale.changed(notebook) == [stale.CELLS] * counts
