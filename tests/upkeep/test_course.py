"""The executor behind `make run` says what ran and where the figures are, and fails if a cell fails."""

import re
import signal
import subprocess
import sys

import jupyter_client
import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from real import until
from refusals import refused

from ddp_helpers.jobs.parameters import execute
from ddp_helpers.launch.kernels import KernelOnFiles
from ddp_helpers.upkeep import course

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
FIGURE = "from ddp_helpers.lessons.shard_the_data import figures\nfigures.picture_of_shards(8, 2, seed=1)"


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
    assert course.run([], every=False, in_place=False) == 0
    said = capsys.readouterr().out
    assert "1/1 cells" in said and "build/figures/01_good_1..1.png" in said
    assert (notebooks.parent / "build" / "figures" / "01_good_1.png").read_bytes().startswith(b"\x89PNG")
    executed = nbformat.read(notebooks.parent / "build" / "notebooks" / "01_good.ipynb", 4)
    assert executed.metadata.executed == course.code_checksum(executed)
    assert nbformat.read(notebooks / "01_good.ipynb", 4).cells[0].outputs == []  # not in place


def test_a_failing_notebook_fails_the_course_and_is_named(notebooks, capsys):
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0"), new_code_cell("1")]), notebooks / "01_bad.ipynb")
    assert course.run([], every=False, in_place=True) == 1
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
    assert course.run(["01"], every=False, in_place=True) == 0
    for executed in (as_nbmake, *(nbformat.read(notebooks / name, 4) for name in ("papermill.ipynb", path.name))):
        assert executed.cells[-1].outputs[0].text == f"ipc {[True] * 5}\n"


def test_no_such_notebook_is_a_failure(notebooks):
    refused(course.run, ["42"], every=False, in_place=False, named=["42", "03"])


WAITS = """import pathlib, time
pathlib.Path("here_{own}").touch()
while not pathlib.Path("here_{other}").exists():
    time.sleep(0.1)"""
SENDS = """# jobs.submit
import pathlib
queue = pathlib.Path("queue")
queue.mkdir()  # fails while another notebook has it
{waits}
queue.rmdir()"""


def test_two_notebooks_run_at_a_time_of_those_that_send_jobs_one_and_of_the_others_the_longest_first(notebooks, capsys):
    cells = {
        "01_sends": (SENDS.format(waits=WAITS.format(own=1, other=3)), 9),  # ends only while 03 runs
        "02_sends": (SENDS.format(waits=""), 8),
        "03_waits": (WAITS.format(own=3, other=1), 7),
        "04_is_short": ("assert pathlib.Path('here_3').exists()", 1),
        "10_is_an_elective": ("1 / 0", 99),
    }
    for name, (source, seconds) in cells.items():
        notebook = new_notebook(cells=[new_code_cell(f"import pathlib\n{source}")], metadata={"seconds": seconds})
        nbformat.write(notebook, notebooks / f"{name}.ipynb")
    assert course.run([], every=False, in_place=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if " ok " in line] == [*cells][:4]
    assert course.run([], every=True, in_place=False) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("10_is_an_elective: ") and "ZeroDivisionError" in said


def test_ctrl_c_ends_the_course_and_its_kernels(notebooks):
    cell = "import os, pathlib, time\npathlib.Path('part').write_text(str(os.getpid()))\nos.rename('part', 'pid')"
    nbformat.write(new_notebook(cells=[new_code_cell(f"{cell}\ntime.sleep(600)")]), notebooks / "01_long.ipynb")
    here = f"from pathlib import Path; from ddp_helpers.upkeep import course; here = Path({str(notebooks.parent)!r})"
    here += "; course.NOTEBOOKS, course.BUILD, course.ROOT = here / 'notebooks', here / 'build', here"
    with subprocess.Popen(
        [sys.executable, "-c", f"{here}; course.run([], False, False)"], stderr=subprocess.PIPE
    ) as started:
        until(lambda: (notebooks / "pid").exists(), "a kernel")
        started.send_signal(signal.SIGINT)
        assert re.fullmatch(r"stopped by Ctrl-C: .*\n", started.communicate()[1].decode())
    assert started.returncode == 1
    kernel = int((notebooks / "pid").read_text())
    until(lambda: not psutil.pid_exists(kernel), "its end")
