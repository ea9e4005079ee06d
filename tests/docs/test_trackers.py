"""Trackers on many ranks, as docs/trackers.md has them, with a real TensorBoard on two real ranks."""

import runpy
import shutil
from pathlib import Path

import pytest
from changed_text import replaced

from ddp_helpers import ROOT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs

pytest.importorskip("tensorboard")  # of the extra `test`

SCRIPT = (ROOT / "notebooks" / "tracked_ddp.py").read_text()
RESULTS = ROOT / "notebooks" / "results" / "two_cpu_cores"


def changed(*changes: tuple[str, str]) -> str:
    """The script with other words in the place of these."""
    return replaced(SCRIPT, changes)


def train(epochs: int, scripts: dict[Path, str]) -> None:
    """Run scripts at once, each in its folder on two ranks, up to an epoch."""
    runs = []
    for folder, text in scripts.items():
        (folder / "tracked_ddp.py").write_text(text)
        runs.append(LearnerRun(folder / "tracked_ddp.py", "--epochs", epochs, ranks=2, folder=folder))
    wait_for_runs(*runs)
    for run in runs:
        assert run.exit_statuses == [0, 0], run.complaint()


def noted(run: Path, name: str) -> list[tuple[int, float]]:
    """The steps and values that TensorBoard's own reader has of a number of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def curves(folder: Path) -> list[list[int]]:
    """The steps of each curve that TensorBoard shows of a folder's runs, the shortest first."""
    runs = (folder / "logs").iterdir()
    return sorted(([step for step, _ in noted(run, "loss")] for run in runs), key=len)


def test_a_run_that_goes_on_is_one_curve_of_the_mean_of_all_ranks(tmp_path: Path) -> None:
    """It is killed when epoch 3 is noted, and not saved. Each rule of the page is left out once, beside it."""
    killed, everybody = tmp_path / "killed", tmp_path / "everybody"
    purge, write = ", purge_step=first)", "            part.replace(args.checkpoint)"
    alone = [("    if rank == 0:", "    if True:"), ("uuid.uuid4().hex[:8]", "1"), (purge, ")")]
    alone += [('with_suffix(".part")', 'with_suffix(f".part{rank}")'), ("dist.all_reduce(mean)", "mean")]
    for folder in (killed, everybody):
        folder.mkdir()
    train(3, {killed: changed((write, f"            epoch == 3 or{write[11:]}")), everybody: changed(*alone)})
    rules = {"all": (), "purge": ((purge, ")"),), "one run": (('state["run_id"]), p', "uuid.uuid4().hex), p"),)}
    for name in rules:
        shutil.copytree(killed, tmp_path / name)
    train(4, {tmp_path / name: changed(*changes) for name, changes in rules.items()})
    assert curves(killed) == [[1, 2, 3]] and curves(tmp_path / "all") == [[1, 2, 3, 4]]
    assert curves(tmp_path / "purge") == [[1, 2, 3, 3, 4]], "epoch 3 is there twice"
    assert curves(tmp_path / "one run") == [[3, 4], [1, 2, 3]], "a second curve"
    [run] = (tmp_path / "all" / "logs").iterdir()
    shares = noted(everybody / "logs" / "run-1", "loss")
    assert sorted(step for step, _ in shares) == [1, 1, 2, 2, 3, 3], "where all ranks write, each is there twice"
    one, other = (value for step, value in shares if step == 1)
    assert one != pytest.approx(other, rel=1e-3)
    assert noted(run, "loss")[0] == (1, pytest.approx(one + other, rel=1e-5)), "half the loss of each rank: their mean"


def test_records_are_shown_as_they_are_up_to_half_a_line(tmp_path: Path) -> None:
    show = runpy.run_path(str(ROOT / "notebooks" / "track_runs.py"))["main"]
    logs, whole, cut = tmp_path / "logs", RESULTS / "strong-1x1-cpus1-seed2", tmp_path / "cut"
    cut.mkdir()
    text = (whole / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text[: len(text) - 9])
    show([str(logs), str(whole), str(cut)])
    epochs = text.count("\n")
    for run, last in ((whole, epochs), (cut, epochs - 1)):
        assert [step for step, _ in noted(logs / run.name, "train_loss")] == [*range(1, last + 1)]
    before = sorted(tmp_path.rglob("*"))
    for words, told in (([logs], "give"), ([logs, tmp_path], "has no metrics.jsonl"), ([logs, whole], "is there")):
        with pytest.raises(SystemExit, match=rf"^.*{told}.*$"):
            show([str(word) for word in words])
    assert sorted(tmp_path.rglob("*")) == before
