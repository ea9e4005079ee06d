"""The executor behind `make run` says what ran and where the figures are, and fails if a cell fails."""

import os
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
from real import LIMIT, until
from refusals import refused

from ddp_helpers.jobs.sweep import execute
from ddp_helpers.launch import launch
from ddp_helpers.launch.kernels import KernelOnFiles
from ddp_helpers.launch.shared import VARIABLE
from ddp_helpers.upkeep import course

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
FIGURE = "from ddp_helpers.lessons.shard_the_data import figures\nfigures.picture_of_shards(8, 2, seed=1)"
LISTENS = """import json
from pathlib import Path
from ipykernel.connect import get_connection_file
told = json.loads(Path(get_connection_file()).read_text())
files = [Path(f"{told['ip']}-{number}") for name, number in told.items() if name.endswith("_port")]
print(told["transport"], [file.is_socket() for file in files])"""
ON_FILES = f"ipc {[True] * 5}\n"


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """An empty course, and where it is built."""
    monkeypatch.setattr(course, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(course, "BUILD", tmp_path / "build")
    monkeypatch.setattr(course, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    return tmp_path / "notebooks"


def write(path, *sources, **metadata):
    """Write a notebook of these cells."""
    nbformat.write(new_notebook(cells=[*map(new_code_cell, sources)], metadata=KERNEL | metadata), path)
    return path


def read(path):
    """The notebook in a file."""
    return nbformat.read(path, as_version=4)


def test_the_core_is_executed_into_build_and_an_error_fails_it(notebooks, capsys):
    good = write(notebooks / "01_good.ipynb", FIGURE, LISTENS)
    write(notebooks / "02_bad.ipynb", "1 / 0", "1")
    write(notebooks / "10_is_an_elective.ipynb", "1")
    assert course.run([], every=False, in_place=False) == 1
    out, err = capsys.readouterr()
    assert "2/2 cells" in out and "build/figures/01_good_1..1.png" in out and "FAILED" in out and "10_is" not in out
    assert "02_bad" in err and "ZeroDivisionError" in err and err.count("\n") == 1
    build = notebooks.parent / "build"
    assert (build / "figures" / "01_good_1.png").read_bytes().startswith(b"\x89PNG")
    executed = read(build / "notebooks" / good.name)
    assert executed.metadata.executed == course.code_checksum(executed)
    assert executed.cells[1].outputs[0].text == ON_FILES
    assert read(build / "notebooks" / "02_bad.ipynb").cells[0].outputs[-1].ename == "ZeroDivisionError"
    assert read(good).cells[0].outputs == []


def test_no_kernel_listens_on_a_port_that_a_rank_could_take_before_it(notebooks, monkeypatch):
    path = write(notebooks / "01_listens.ipynb", LISTENS)
    NotebookClient(as_nbmake := read(path)).execute()
    monkeypatch.setattr(jupyter_client, "AsyncKernelManager", KernelOnFiles.__base__)  # conftest's is for tests alone
    execute(path, notebooks / "papermill.ipynb")
    assert course.run(["01"], every=False, in_place=True) == 0
    for executed in (as_nbmake, read(notebooks / "papermill.ipynb"), read(path)):
        assert executed.cells[-1].outputs[0].text == ON_FILES


def in_another_process(notebooks):
    """A program that executes this course as `make run` does."""
    here = f"from pathlib import Path; from ddp_helpers.upkeep import course; here = Path({str(notebooks.parent)!r})"
    here += "; course.NOTEBOOKS, course.BUILD, course.ROOT = here / 'notebooks', here / 'build', here"
    return [sys.executable, "-c", f"{here}; course.run([], False, False)"]


def test_the_sockets_of_a_run_have_short_paths_where_that_of_tmpdir_is_long(notebooks, tmp_path):
    write(notebooks / "01_listens.ipynb", LISTENS)
    (long := tmp_path / ("t" * 120)).mkdir()
    env = {**os.environ, "TMPDIR": str(long), VARIABLE: ""}
    done = subprocess.run(in_another_process(notebooks), env=env, capture_output=True, text=True, timeout=LIMIT)
    assert " ok " in done.stdout and done.stderr == "", done
    executed = read(tmp_path / "build" / "notebooks" / "01_listens.ipynb")
    assert executed.cells[0].outputs[0].text == ON_FILES


def test_a_checkout_that_one_may_not_write_to_is_one_line(notebooks, monkeypatch):
    write(notebooks / "01_good.ipynb", "1")
    (notebooks.parent / "build").touch()  # as little a folder to write to as root's is to others
    refused(course.run, [], every=False, in_place=False, named=["build", "a copy of the course of your own"])
    monkeypatch.setattr(launch, "ROOT", notebooks.parent)
    refused(launch.launch_magic, "2", "1", named=["build", "a copy of the course of your own"])


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


def test_two_run_at_a_time_the_longest_first_and_one_that_sends_jobs(notebooks, capsys):
    cells = {
        "01_sends": (SENDS.format(waits=WAITS.format(own=1, other=4)), 9),  # ends only while 04 runs
        "02_sends": (SENDS.format(waits="assert pathlib.Path('here_1').exists()"), 8),
        "03_is_short": ("import pathlib; assert pathlib.Path('here_4').exists()", 1),
        "04_waits": (WAITS.format(own=4, other=1), 7),
        "10_is_an_elective": ("", 5),
    }
    for name, (source, seconds) in cells.items():
        write(notebooks / f"{name}.ipynb", source, seconds=seconds)
    assert course.run([], every=True, in_place=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if " ok " in line] == [*cells]


def test_ctrl_c_ends_the_course_and_its_kernels(notebooks):
    cell = "import os, pathlib, time\npathlib.Path('part').write_text(str(os.getpid()))\nos.rename('part', 'pid')"
    write(notebooks / "01_long.ipynb", f"{cell}\ntime.sleep(600)")
    with subprocess.Popen(in_another_process(notebooks), stderr=subprocess.PIPE) as started:
        until(lambda: (notebooks / "pid").exists(), "a kernel")
        started.send_signal(signal.SIGINT)
        assert re.fullmatch(r"stopped by Ctrl-C: .*\n", started.communicate()[1].decode())
    assert started.returncode == 1
    kernel = int((notebooks / "pid").read_text())
    until(lambda: not psutil.pid_exists(kernel), "its end")
