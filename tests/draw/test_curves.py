"""The curves of run records: a panel for each metric that they hold, and a command that draws them."""

import json
import re

import matplotlib.pyplot as plt
import pytest
from real import python
from refusals import ended

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.draw.curves import curves
from ddp_helpers.records import runs

RESULTS = ROOT / "notebooks" / "results"
# What each epoch of a run holds besides its loss; the panels from top to bottom, and how the title ends.
PANELS = {
    "classes": ({"test_accuracy": 0.9}, ["test loss", "test accuracy"], "90.0% accuracy"),
    "a regression": ({}, ["test loss"], "test loss 0.125"),
    "a metric of one's own": ({"train_top2": 0.7, "test_top2": 0.8}, ["test loss", "test top2"], "test loss 0.125"),
    "a maximum of training alone": ({"train_max_error": 3.5}, ["test loss", "training max error"], "test loss 0.125"),
    "a validation": ({"val_accuracy": 97}, ["test loss", "validation accuracy"], "validation accuracy 97"),
    "any name": ({"perplexity": 7.5}, ["test loss", "perplexity"], "test loss 0.125"),
    "one that diverges": ({"test_error": float("inf")}, ["test loss"], "test loss 0.125"),
    "no loss": ({"test_loss": None, "bleu": 20.0}, ["bleu"], "bleu 20"),
    "nothing": ({"test_loss": None}, ["test loss"], "Test loss by epoch"),
}


def record(folder, state="done", **more):
    """A record of two epochs on two ranks, as a script of one's own may write it."""
    folder.mkdir(parents=True)
    files = {"spec": {"batch_size": 64}, "env": {"world_size": 2, "dataset": "sines"}, "status": {"state": state}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    lines = [{"epoch": epoch, "train_loss": 0.5, "test_loss": 0.125, "seconds": 1.0} | more for epoch in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("case", PANELS)
def test_each_metric_of_a_record_has_a_panel_and_no_panel_is_empty(case, tmp_path):
    more, panels, title = PANELS[case]
    if "test_loss" in more:
        more = more | {"train_loss": None}
    picture = curves(runs.table(record(tmp_path / "run", **more)))
    assert [ax.get_ylabel() for ax in picture.figure.axes] == panels
    assert picture.figure.get_suptitle().endswith(title) and "nan" not in picture.alt
    texts = [[text.get_text() for text in ax.texts] for ax in picture.figure.axes]
    assert all(here == (["not recorded"] if case == "nothing" else ["2 ranks"]) for here in texts)
    assert picture.save(tmp_path / "curve.png").stat().st_size > 10_000
    plt.close("all")


def test_runs_of_two_kinds_with_a_loss_alone_are_told_apart_in_the_title(tmp_path):
    record(tmp_path / "strong")
    record(tmp_path / "weak", test_loss=0.25)
    (tmp_path / "weak" / "spec.json").write_text('{"batch_size": 64, "batch_size_per_rank": 32}')
    title = curves(runs.table(tmp_path)).figure.get_suptitle().replace("\n", " ")
    assert re.findall(r"0\.\d+", title)[-2:] == ["0.125", "0.25"], title  # with one global batch; one for each rank
    plt.close("all")


def test_a_run_that_is_not_done_is_drawn_as_far_as_it_came_and_its_state_is_said(tmp_path, capsys):
    for state in ("done", "running", "failed", "preempted"):
        record(tmp_path / state, state)
    record(tmp_path / "begun", "running")
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    picture = curves(runs.table(tmp_path))
    labels = {text.get_text() for ax in picture.figure.axes for text in ax.texts}
    assert labels == {"2 ranks", "2 ranks, running", "2 ranks, failed", "2 ranks, preempted"}
    for part in ("3 runs not done", "1 failed", "1 running", "1 preempted", "1 run without an epoch left out"):
        assert part in picture.alt and part in picture.figure.get_supxlabel().replace("\n", " ")
    for state in ("running", "failed", "preempted"):  # each alone, by the command
        assert main(["curve", str(tmp_path / state), "--out", str(tmp_path / f"{state}.png")]) == 0
        assert f"1 run not done: 1 {state}" in capsys.readouterr().out
    plt.close("all")


def curve(*words, cwd):
    """Type the command."""
    return python("-m", "ddp_helpers", "curve", *words, cwd=cwd)


def test_the_command_draws_a_record_and_says_what_it_shows(tmp_path):
    record(tmp_path / "mine", test_error=0.5)
    done = curve("mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test loss 0.125" in done.stdout and "test error" in done.stdout and "curve.png" in done.stdout
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    done = curve(RESULTS / "two_cpu_cores", "mine", "--out", "both.pdf", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "both.pdf").read_bytes()[:4] == b"%PDF"


REFUSED = {
    "no folder": (["nowhere"], ["nowhere", "spec.json"]),
    "no record": (["."], ["holds no record"]),
    "no epoch yet": (["begun"], ["1 running or killed", "wait for"]),
    "no picture": (["mine", "--out", "mine.py"], ["mine.py", ".png"]),
    "no place": (["mine", "--out", "none/c.png"], ["none/c.png", "another folder"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_is_one_line(case, tmp_path):
    (tmp_path / "empty").mkdir()
    record(tmp_path / "runs" / "mine")
    record(tmp_path / "runs" / "begun", "running")
    (tmp_path / "runs" / "begun" / "metrics.jsonl").write_text("")
    words, told = REFUSED[case]
    done = curve(*words, cwd=tmp_path / ("empty" if case == "no record" else "runs"))
    ended(done.returncode, done.stdout, done.stderr, *told)
