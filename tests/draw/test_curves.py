"""The curves of run records: a panel for each metric that they hold, and a command that draws them."""

import re

import matplotlib.pyplot as plt
import pytest
from refusals import refused
from run_folders import write_run

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


def record(folder, state="done", epochs=2, per_rank=None, ranks=None, **more):
    """A record of two epochs on two ranks, as a script of one's own may write it."""
    env = {"world_size": 2, "dataset": "sines", "ranks": ranks}
    line = {"train_loss": 0.5, "test_loss": 0.125, "seconds": 1.0} | more
    lines = [{"epoch": epoch + 1} | line for epoch in range(epochs)]
    spec = {"batch_size": 64, "batch_size_per_rank": per_rank}
    return write_run(folder, lines, spec=spec, env=env, status={"state": state})


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
    assert all(text.get_fontsize() >= 10 for text in picture.figure.findobj(plt.Text) if text.get_text())


def test_the_title_tells_two_kinds_of_runs_apart(tmp_path):
    for metric, scale, ends in (("test_loss", 1, (0.125, 0.25, 0.5)), ("test_accuracy", 100, (0.97, 0.91, 0.93))):
        for number, value in enumerate(ends):
            record(tmp_path / metric / str(number), per_rank=32 if number else None, **{metric: value})
        title = curves(runs.table(tmp_path / metric)).figure.get_suptitle()
        said = [float(number) for number in re.findall(r"\d+\.\d+", title)]
        assert said == pytest.approx([scale * end for end in ends]), title  # one global batch; from, to with one a rank


def test_ranks_are_called_after_their_machine(tmp_path):
    for device, chip, of_two, machine in (
        ("cuda:0", "NVIDIA A100", "2 GPUs", "sines on NVIDIA A100"),
        ("cpu", "Intel Xeon", "2 ranks", "sines on CPU (Intel Xeon)"),
    ):
        ranks = [{"local_rank": rank, "device": device, "chip": chip} for rank in (0, 1)]
        picture = curves(runs.table(record(tmp_path / chip, ranks=ranks)))
        assert [text.get_text() for text in picture.figure.axes[0].texts] == [of_two] and machine in picture.alt


def test_a_run_that_is_not_done_is_drawn_with_its_state(tmp_path, capsys):
    for number, state in enumerate(("done", "running", "failed", "preempted")):
        record(tmp_path / state, state, test_loss=0.125 + number)
    record(tmp_path / "begun", "running", epochs=0)
    picture = curves(runs.table(tmp_path))
    labels = {text.get_text() for ax in picture.figure.axes for text in ax.texts}
    assert labels == {"2 ranks", "2 ranks, running", "2 ranks, failed", "2 ranks, preempted"}
    assert picture.figure.get_suptitle().endswith("test loss 0.125"), "of the run that is done"
    for part in ("3 runs not done", "1 failed", "1 running", "1 preempted", "1 run without an epoch left out"):
        assert part in picture.alt and part in picture.figure.get_supxlabel().replace("\n", " ")
    for state in ("running", "failed", "preempted"):  # each alone, by the command
        assert main(["curve", str(tmp_path / state), "--out", str(tmp_path / f"{state}.png")]) == 0
        assert f"1 run not done: 1 {state}" in capsys.readouterr().out


def test_the_command_draws_records_and_says_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "mine", test_error=0.5)
    assert main(["curve", "mine"]) == 0
    said = capsys.readouterr().out
    assert "test loss 0.125" in said and "test error" in said and "curve.png" in said
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["curve", str(RESULTS / "two_cpu_cores"), "mine", "--out", "both.pdf"]) == 0
    assert (tmp_path / "both.pdf").read_bytes()[:4] == b"%PDF"


REFUSED = {
    "nowhere": ["nowhere", "spec.json"],
    "empty": ["empty", "holds no record"],
    "begun": ["1 running or killed", "wait for"],
    "mine --out mine.py": ["mine.py", ".png"],
    "mine --out none/c.png": ["none/c.png", "another folder"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_drawn_is_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    record(tmp_path / "mine")
    record(tmp_path / "begun", "running", epochs=0)
    refused(main, ["curve", *words.split()], named=REFUSED[words])


def test_the_thick_line_is_the_median_of_equal_runs(tmp_path):
    for number, loss in enumerate((0.1, 0.2, 9.0)):  # one diverged: it would bend a mean
        record(tmp_path / str(number), test_loss=loss)
    lines = curves(runs.table(tmp_path)).figure.axes[0].get_lines()
    thick = [line.get_ydata().tolist() for line in lines if line.get_linewidth() == 2]
    assert [0.2, 0.2] in thick and not any(max(ys) > 1 for ys in thick), thick
