"""Many people's notebooks are graded, each exercise in a process of its own: the table says what each one did."""

import csv
import json
import re
from itertools import compress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from notebook_texts import asked, cells
from real import LIMIT, python
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.lessons import grade, submissions
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT

NOTEBOOKS = ROOT / "notebooks"
NUMBERED = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
STUB = "raise NotImplementedError"
FORGED = f"print('\\x1b[38;5;231;48;5;28m{RIGHT}\\x1b[0m', flush=True)"


def hand_in(path: Path, number: str, answers: dict[str, str]) -> None:
    """Write a copy of a notebook, with some answers in the place of its stubs."""
    [original] = NOTEBOOKS.glob(f"{number}_*.ipynb")
    notebook = json.loads(original.read_text())
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        for name, body in answers.items():
            if f"def {name}(" in source:
                cell["source"] = source.replace(STUB, body, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook))


def worked(path: Path, number: str, name: str) -> None:
    """Write the worked solutions of a notebook with one of its answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    [original] = NOTEBOOKS.glob(f"solutions/{number}_*.ipynb")
    notebook = json.loads(original.read_text())
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    kept = ["lessons.check(" not in source or f"lessons.check({name})" in source for source in sources]
    path.write_text(json.dumps(notebook | {"cells": [*compress(notebook["cells"], kept)]}))


def table(folder: Path, status: int, limit: int = LIMIT) -> dict[tuple[str, str], str]:
    """Grade a folder by the command; give the results of each person by exercise, as the file has them."""
    out = folder.parent / "results.csv"
    run = python("-m", "ddp_helpers", "grade", folder, "--csv", out, "--limit", limit, cwd=ROOT)
    assert run.returncode == status, run.stdout + run.stderr
    with out.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert all(row["result"] in run.stdout for row in rows)
    assert len(run.stdout.splitlines()) == 1 + len(rows), "a learner's text makes no line of its own"
    return {(row["person"], row["exercise"]): row["result"] for row in rows}


def test_one_table_says_what_each_of_three_people_did(tmp_path):
    folder = tmp_path / "handed_in"
    worked(folder / "ann" / "12_find_the_lost_time.ipynb", "12", "pays_below")
    hand_in(folder / "bob_12b.ipynb", "12b", {"most_ranks": "return samples"})
    far = "import socket\n    socket.create_connection(('192.0.2.1', 80), timeout=5)"
    leaves = (
        "from ddp_helpers import ROOT\n    assert not [*ROOT.glob('left')], 'mixed'\n    (ROOT / 'left').touch()\n    "
    )
    own = {"sweep_gpu_hours": far, "epoch_steps": leaves + STUB, "soonest": leaves + STUB}
    hand_in(folder / "cleo" / "week 3" / "my own.ipynb", "08", own)
    quits = f"{FORGED}\n    import os\n    os._exit(0)"
    forges = f"{FORGED}\n    raise ValueError('\\nann 12 right\\x1b[2K')"
    again = {"not_hidden": quits, "late_and_exchange": forges, "pays_below": f"{FORGED}\n    return 0"}
    hand_in(folder / "cleo" / "12_find_the_lost_time.ipynb", "12", again)
    results = table(folder, status=0)
    assert results.pop(("ann", "pays_below")) == RIGHT
    assert results.pop(("ann", "not_hidden")) == results.pop(("ann", "late_and_exchange")) == "no cell defines it"
    assert results.pop(("bob", "most_ranks")).startswith("not yet: ")
    # Where no process may have a network of its own, as in many a container, the command says so in its first line.
    may_leave = python("-c", "from ddp_helpers.lessons import grade; grade.leave_the_network()", cwd=ROOT)
    why = "[nN]etwork" if may_leave.returncode == 0 else "Error"
    assert re.match(f"not yet: .* ends with .*{why}", results.pop(("cleo", "sweep_gpu_hours")))
    assert results.pop(("cleo", "epoch_steps")) == results.pop(("cleo", "soonest")) == NOT_ATTEMPTED
    assert results.pop(("cleo", "not_hidden")) == "its process ends without a verdict: exit status 0"
    assert results.pop(("cleo", "late_and_exchange")).endswith("ValueError: ann 12 right?[2K")
    assert results.pop(("cleo", "pays_below")).startswith("not yet: ")
    assert not results


def test_an_answer_that_never_ends_is_ended_with_all_that_it_has_started(tmp_path):
    token = uuid4().hex
    endless = f"import subprocess, sys\n    code = 'while True: pass  # {token}'\n    subprocess.Popen("
    endless += "[sys.executable, '-c', code], start_new_session=True)\n    while True:\n        pass"
    hand_in(tmp_path / "bob" / "12b.ipynb", "12b", {"most_ranks": endless})
    results = table(tmp_path / "bob", status=0, limit=10)
    assert results == {("bob", "most_ranks"): "ended by the time limit of 10 s"}
    assert not [each for each in psutil.process_iter(["cmdline"]) if token in str(each.info["cmdline"])]


def test_what_cannot_be_graded_is_named_and_is_no_result(tmp_path):
    folder = tmp_path / "handed_in"
    worked(folder / "ann" / "05_wrap_the_model.ipynb", "05", "average_in_one")  # on live ranks
    worked(folder / "bob" / "06_train_mnist_with_ddp.ipynb", "06", "my_ddp_script")  # without the script that it names
    worked(folder / "cleo" / "07_submit_to_slurm.ipynb", "07", "job_file")  # without a Slurm
    (folder / "dan.ipynb").write_text("[" * 100_000)
    (folder / "eve.ipynb").write_text('{"cells": [{"cell_type": "code", "source": "print(1)"}]}')
    results = table(folder, status=1)
    failed = {key for key, result in results.items() if result.startswith(grade.NOT_GRADED)}
    assert failed == {("bob", "my_ddp_script"), ("cleo", "job_file"), ("dan", "-"), ("eve", "-")}
    assert results[("ann", "average_in_one")] == RIGHT


def test_a_cell_that_fails_is_told_as_that():
    for source, told in (
        ("import none_such\ndef pays_below(*_): ...", "the cell fails with ModuleNotFoundError: "),
        ("def pays_below(*_): raise SystemExit", "not yet: pays_below(4800000, 2.0, 0.002, 2) ends with SystemExit"),
        ("pays_below = 3", "not yet: "),
        ("lessons.check = lessons.exercise_called = print\ndef pays_below(*_): return 'right'", "not yet: "),
        ("%matplotlib inline\n!ls\ndef pays_below(*_):\n    raise NotImplementedError", NOT_ATTEMPTED),
    ):
        program = submissions.program([source], "pays_below", on_ranks=False)
        result = grade._run("pays_below", 0, program, None, LIMIT, False)
        assert result.startswith(told), source


def test_each_notebook_of_the_course_is_recognised_whatever_its_copy_is_called():
    originals = {path.stem: submissions.exercises_in(path) for path in NUMBERED}
    assert {path.stem: [*originals[path.stem]] for path in NUMBERED} == {path.stem: asked(path) for path in NUMBERED}
    for path in [*NUMBERED, *NOTEBOOKS.glob("solutions/*.ipynb")]:
        assert submissions.recognise("\n".join(cells(path, "code")), originals) == path.stem
    with pytest.raises(ValueError, match="no function"):
        submissions.recognise("print(1)", originals)


def test_of_the_cells_above_only_what_an_exercise_needs_runs():
    above = [
        "from os.path import *\nimport json, re\nTABLE = {}\nmodel = 1",
        "train(model)\ndef helper():\n    return TABLE, json.loads, unknown",
        "TABLE['a'] = 1\nprint('drawn')\nif TABLE:\n    size = 2",
        "%%launch 2\nsize = 3",
        "%%time\nsize += 1",
    ]
    cell = "def f(model):\n    return helper(), size, model"
    below = "def f(model):\n    raise NotImplementedError"
    kept = submissions.program([*above, cell, below], "f", on_ranks=False)
    lines = ["from os.path import *", "import json, re", "TABLE = {}", "def helper():"]
    lines += ["    return (TABLE, json.loads, unknown)", "TABLE['a'] = 1", "if TABLE:", "    size = 2", "size += 1"]
    assert kept.strip().splitlines() == [*lines, *cell.splitlines()]
    future = "from __future__ import annotations"
    first, *_ = submissions.program(["import re", f"{future}\nx = re.I\ndef f(): return x"], "f", False).splitlines()
    assert first == future
    assert not submissions.program(["print(1)"], "f", on_ranks=False)


def test_wrong_use_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(main, ["grade", "none"])
    refused(main, ["grade", "."])
    (tmp_path / "02.ipynb").touch()
    for words in (["--limit", "0"], ["--csv", "none/out.csv"]):
        refused(main, ["grade", ".", *words])
