"""The projects of notebook 17: right answers pass, and whatever is missing or still wrong is told in one line."""

import json
import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient
from notebook_texts import asked

from ddp_helpers import ROOT, RUNS
from ddp_helpers.launch.scripts import script_text
from ddp_helpers.lessons import exercise_called, exercises
from ddp_helpers.lessons.do_it_yourself import mending
from ddp_helpers.lessons.do_it_yourself.own_net import list_missing
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, SEPARATOR

pytestmark = pytest.mark.xdist_group("17_do_it_yourself")  # they write the same folders

SOLUTION = ROOT / "notebooks" / "solutions" / "17_do_it_yourself.ipynb"
MY_RUN, MEND = exercises()["my_run"], exercises()["mend"]


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """Execute the worked solutions; what they print, and the folder of the run that they make."""
    before = set(RUNS.glob("17_my_net-*"))
    notebook = nbformat.read(SOLUTION, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(SOLUTION.parent)}}).execute()
    printed = [out.text for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == "stream"]
    [folder] = set(RUNS.glob("17_my_net-*")) - before
    kept = shutil.move(folder, tmp_path_factory.mktemp("solved") / folder.name)
    return "".join(printed).splitlines(), kept


def test_the_worked_solutions_are_right(solved):
    names = asked(SOLUTION.parents[1] / SOLUTION.name)
    assert asked(SOLUTION) == names and solved[0].count(f"\x1b[1;38;5;28m{RIGHT}\x1b[0m") == len(names) == 4
    assert len([line for line in solved[0] if line.startswith("found: ")]) == 2 + len(mending.FAULTS) + 1 + 2


# ---- a net of one's own


def test_the_record_of_a_right_run_lacks_nothing(solved):
    assert list_missing(solved[1], 2, 2) == []


def change(name, **values):
    """Change values in one JSON file of a run folder, or in the last line of metrics.jsonl."""

    def doctor(folder):
        text = (folder / name).read_text()
        *lines, last = text.splitlines() if name == "metrics.jsonl" else [text]
        (folder / name).write_text("\n".join([*lines, json.dumps(json.loads(last) | values)]) + "\n")

    return doctor


def without_record(folder):
    for name in ("spec.json", "env.json", "status.json", "metrics.jsonl"):
        (folder / name).unlink()


DOCTORED = {
    "no job": (lambda folder: (folder / "job.json").unlink(), "jobs.write_job(job, site, folder)"),
    "only written": (change("job.json", state="WRITTEN", job_id=None), "jobs.submit(folder)"),
    "not collected": (change("job.json", state="PENDING", job_id="7"), "jobs.collect(folder)"),
    "no record": (without_record, "--run-dir {run_dir}"),
    "failed": (change("status.json", state="failed", why="NotImplementedError: "), "'failed': NotImplementedError"),
    "too few ranks": (change("env.json", world_size=2), "the world size is 2 on 2 nodes, but"),
    "the course's net": (
        lambda folder: (folder / "mnist_ddp.py").write_text(script_text("mnist_ddp")),
        "replace=[Net]",
    ),
    "no net": (lambda folder: (folder / "mnist_ddp.py").write_text("class Other: pass"), "replace=[Net]"),
    "padded test": (change("metrics.jsonl", test_samples=514), "514 test images were counted, and there are 512"),
    "guesses": (change("metrics.jsonl", test_accuracy=0.1), "10.0% of the test images are right"),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_what_a_record_lacks_is_told_in_one_line(what, solved, tmp_path):
    doctor, told = DOCTORED[what]
    folder = shutil.copytree(solved[1], tmp_path / "run")
    doctor(folder)
    [line] = list_missing(folder, 2, 2)
    assert told in line and "\n" not in line


def test_several_things_are_told_at_once(solved, tmp_path):
    folder = shutil.copytree(solved[1], tmp_path / "run")
    for what in ("the course's net", "padded test", "guesses"):
        DOCTORED[what][0](folder)
    assert len(list_missing(folder, 2, 2)) == 3


def test_a_run_is_asked_for_the_shape_of_the_notebooks_parameters(solved):
    [line] = list_missing(solved[1], 1, 3)
    assert re.findall(r"\d+", line)[:5] == ["4", "2", "1", "3", "3"], line  # its ranks and nodes; those asked for


def test_a_function_that_makes_no_run_is_told_so():
    assert MY_RUN.verdict(lambda folder: None).startswith("not yet: ")
    assert MY_RUN.verdict(lambda folder: 1 / 0).endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("project", [MY_RUN, MEND], ids=["my_run", "mend"])
def test_a_stub_is_not_attempted(project):
    def stub(_):
        raise NotImplementedError

    assert project.verdict(stub) == NOT_ATTEMPTED


# ---- the faulty script


def right_mend(text):
    for fault in mending.FAULTS:
        text = text.replace(fault.wrong, fault.right)
    return text


def test_the_faulty_script_is_the_courses_own_but_for_its_faults():
    text = script_text("mnist_ddp")
    assert all(text.count(fault.right) == 1 for fault in mending.FAULTS)
    assert mending.faulty_script() != text == right_mend(mending.faulty_script())
    compile(mending.faulty_script(), "faulty", "exec")


@pytest.mark.parametrize("left", mending.FAULTS, ids=lambda fault: fault.praise)
def test_a_fault_that_is_left_is_found_alone(left, capsys):
    verdict = MEND.verdict(lambda text: right_mend(text).replace(left.right, left.wrong))
    assert verdict.startswith("not yet: ") and verdict.endswith(left.hint)
    praised = [line for line in capsys.readouterr().out.splitlines() if line.startswith("found: ")]
    assert praised == [f"found: {fault.praise}" for fault in mending.FAULTS if fault is not left]


EXACT = "range(rank, len(test_set), world_size)"
PADDED = "list(DistributedSampler(test_set, world_size, rank, shuffle=False))"
# In train(), before its end: the weights of the ranks are averaged, which is too late.
END = "\n    if rank == 0 and args.save_model"
LATE = "    for p in model.parameters():\n        dist.all_reduce(p.data.div_(world_size))\n"
WRONG = {  # plausible mistakes in mending: what they make of the right script, and what is told
    "the same epoch every time, and a padded test": (
        [("set_epoch(epoch)", "set_epoch(args.epochs)"), (EXACT, PADDED)],
        [f"still there: {fault.hint}" for fault in mending.FAULTS[:2]],
    ),
    "each tests all": (
        [(f"Subset(test_set, {EXACT})", "test_set")],
        [f"still there: {mending.FAULTS[1].hint}"],
    ),
    "the weights of the end are averaged": (
        [(mending.FAULTS[2].right, mending.FAULTS[2].wrong), (END, f"\n{LATE}{END[1:]}")],
        [mending.NOT_AS_ONE_PROCESS],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_mending_is_found(what):
    changes, told = WRONG[what]

    def mend(text):
        text = right_mend(text)
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        return text

    assert MEND.verdict(mend).removeprefix("not yet: ").split(SEPARATOR) == told


@pytest.mark.parametrize(
    ("mend", "told"),
    [
        (lambda text: text, "mend changes nothing"),
        (lambda text: None, "mend gives NoneType"),
        (lambda text: text.replace("    def forward", "  def forward"), "the script does not run any more: rank"),
        (lambda text: text.replace("range(0, len", "rang(0, len"), "name 'rang' is not defined"),
    ],
    ids=["nothing", "no text", "no Python", "no run"],
)
def test_a_text_that_cannot_be_run_is_told_so(mend, told):
    verdict = MEND.verdict(mend)
    assert verdict.startswith("not yet: ") and told in verdict


# ---- a script that survives a kill

SURVIVOR = exercise_called("my_resumable_script")
FORGOTTEN = {  # what is taken from the solution, and what is told
    "the optimizer": ('"optimizer": optimizer, ', "the weights differ by"),
    "everything": ("    restore(checkpoints, parts, progress)\n", "began with epoch 1"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_a_script_forgets_in_a_kill_is_told(what, tmp_path):
    line, told = FORGOTTEN[what]
    text, script = (ROOT / "notebooks" / "spirals_resumable.py").read_text(), tmp_path / "mine.py"
    assert text.count(line) == 1
    script.write_text(text.replace(line, ""))
    assert told in SURVIVOR.verdict(lambda: script)
