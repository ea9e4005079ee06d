"""The projects of notebook 17: whatever is missing or still wrong is told in one line, and what is right is not."""

import json
import re
import shutil
from dataclasses import asdict

import own_parts
import pytest
from changed_text import replaced

from ddp_helpers import ROOT, jobs
from ddp_helpers.lessons import exercise_called, exercises
from ddp_helpers.lessons.do_it_yourself import mending, own_net
from ddp_helpers.lessons.do_it_yourself.own_net import list_missing
from ddp_helpers.lessons.exercise import SEPARATOR
from ddp_helpers.rank.scripts import script_text, write_script

MY_RUN, MEND = exercises()["my_run"], exercises()["mend"]

# ---- a net of one's own

RECORDED = ROOT / "notebooks" / "results" / "two_cpu_cores" / "strong-2x2-cpus1-seed1"


def change(name, **values):
    """Change values in one JSON file of a run folder, or in the last line of metrics.jsonl."""

    def doctor(folder):
        text = (folder / name).read_text()
        *lines, last = text.splitlines() if name == "metrics.jsonl" else [text]
        (folder / name).write_text("\n".join([*lines, json.dumps(json.loads(last) | values)]) + "\n")

    return doctor


@pytest.fixture
def run(tmp_path, digits):
    """The recorded run of 2 nodes of 2 ranks, as if its script had held another net and read 200 test images."""
    folder = shutil.copytree(RECORDED, tmp_path / "run")
    write_script("mnist_ddp", folder / "mnist_ddp.py", parts=own_parts.__file__)
    job = jobs.Job("17_my_net", ("mnist_ddp.py", "--epochs", "2"), nodes=2, ranks_per_node=2, gpus_per_node=2)
    change("job.json", job=asdict(job))(folder)
    change("spec.json", data=str(digits))(folder)
    change("metrics.jsonl", test_samples=200)(folder)
    return folder


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
        "parts=",
    ),
    "no net": (lambda folder: (folder / "mnist_ddp.py").write_text("class Other: pass"), "parts="),
    "padded test": (change("metrics.jsonl", test_samples=202), "202 test images were counted, and there are 200"),
    "guesses": (change("metrics.jsonl", test_accuracy=0.1), "10.0% of the test images are right"),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_what_a_record_lacks_is_told_in_one_line(what, run):
    assert list_missing(run, 2, 2) == [], "the control: of a right run nothing"
    doctor, told = DOCTORED[what]
    doctor(run)
    [line] = list_missing(run, 2, 2)
    assert told in line and "\n" not in line


def test_several_things_are_told_at_once_and_the_shape_is_that_of_the_notebooks_parameters(run):
    [line] = list_missing(run, 1, 3)
    assert re.findall(r"\d+", line)[:5] == ["4", "2", "1", "3", "3"], line  # its ranks and nodes; those asked for
    for what in ("the course's net", "padded test", "guesses"):
        DOCTORED[what][0](run)
    assert len(list_missing(run, 2, 2)) == 3


def test_a_function_that_makes_no_run_is_told_so():
    assert MY_RUN.verdict(lambda folder: None).startswith("not yet: ")
    assert MY_RUN.verdict(lambda folder: 1 / 0).endswith("ZeroDivisionError: division by zero")


def test_of_a_right_run_it_is_told_whether_one_machine_played_its_nodes(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(own_net, "RUNS", tmp_path / "runs")
    ranks = json.loads((run / "env.json").read_text())["ranks"]
    for hosts, told in (
        (["one"] * 4, "2 nodes, simulated by one machine,"),
        (["one"] * 2 + ["two"] * 2, "2 nodes, your"),
    ):
        places = [rank | {"host": host} for rank, host in zip(ranks, hosts, strict=True)]
        change("env.json", ranks=places)(run)
        change("metrics.jsonl", test_samples=200.0)(run)  # of a sum that was all-reduced as a float
        assert MY_RUN.verdict(lambda folder: shutil.copytree(run, folder, dirs_exist_ok=True)) == "right"
        said = capsys.readouterr().out
        assert f"world size 4 on {told}" in said and "right of 200 test images" in said, said


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


ORDER, TESTS, WEIGHTS = mending.FAULTS
EXACT = "range(rank, len(test_set), world_size)"
PADDED = "list(DistributedSampler(test_set, world_size, rank, shuffle=False))"
# In train(), before its end: the weights of the ranks are averaged, which is too late.
END = "\n    if rank == 0 and args.save_model"
LATE = "    for p in model.parameters():\n        dist.all_reduce(p.data.div_(world_size))\n"
WRONG = {  # plausible mistakes in mending: what they make of the right script, and the faults that are left
    **{f"not {fault.praise}": ([(fault.right, fault.wrong)], [fault]) for fault in mending.FAULTS},
    "one epoch, padded": ([("set_epoch(epoch)", "set_epoch(args.epochs)"), (EXACT, PADDED)], [ORDER, TESTS]),
    "each tests all": ([(f"Subset(test_set, {EXACT})", "test_set")], [TESTS]),
    "the weights of the end are averaged": ([(WEIGHTS.right, WEIGHTS.wrong), (END, f"\n{LATE}{END[1:]}")], []),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_left_or_mended_badly_is_found_and_what_is_right_is_praised(what, capsys):
    changes, left = WRONG[what]

    def mend(text):
        return replaced(right_mend(text), changes)

    told = [f"still there: {fault.hint}" for fault in left] or [mending.NOT_AS_ONE_PROCESS]
    assert MEND.verdict(mend).removeprefix("not yet: ").split(SEPARATOR) == told
    praised = [line for line in capsys.readouterr().out.splitlines() if line.startswith("found: ")]
    assert praised == [f"found: {fault.praise}" for fault in mending.FAULTS if fault not in left]


def test_a_text_that_cannot_be_run_is_told_so():
    for mend, *told in (
        (lambda text: text, "mend changes nothing"),
        (lambda text: None, "mend gives NoneType"),
        (
            lambda text: text.replace("range(0, len", "rang(0, len"),
            "the script no longer runs: rank",
            "name 'rang' is not defined",
        ),
    ):
        verdict = MEND.verdict(mend)
        assert verdict.startswith("not yet: ") and all(words in verdict for words in told), verdict


# ---- a script that survives a kill

SURVIVOR = exercise_called("my_resumable_script")
RESTORED, SAVED = "    restore(checkpoints, parts, progress)\n", "        torch.save(model.cpu().state_dict(), "
OFF = "        for weights in model.parameters():\n            weights.data.mul_(1 + 1e-6 * resumed)\n"
FORGOTTEN = {  # what is changed in the solution, and what is told
    "everything": ([(RESTORED, "")], "started with epoch 1"),
    "the last bits": (
        [(RESTORED, f"{RESTORED}    resumed = progress['step'] > 0\n"), (SAVED, OFF + SAVED)],
        "the weights differ by",
    ),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_a_script_forgets_in_a_kill_is_told(what, tmp_path):
    changes, told = FORGOTTEN[what]
    (script := tmp_path / "mine.py").write_text(
        replaced((ROOT / "notebooks" / "spirals_resumable.py").read_text(), changes)
    )
    assert told in SURVIVOR.verdict(lambda: script)
