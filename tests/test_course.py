"""The executor behind `make run`: it says what ran and where the figures are, and fails if a cell fails."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from ddp_helpers.notebook import course

FIGURE = "from ddp_helpers.notebook import diagrams\ndiagrams.global_batch(8, 2)"


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


def test_no_such_notebook_is_a_failure(notebooks):
    assert course.run(["42"], in_place=False) == 1
