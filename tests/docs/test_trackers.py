"""Trackers on many ranks, as docs/trackers.md has them, with a real TensorBoard on two real ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
from real import LIMIT
from refusals import one_line

from ddp_helpers import ROOT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs

pytest.importorskip("tensorboard")  # of the extra `test`

SCRIPT = (ROOT / "notebooks" / "tracked_ddp.py").read_text()
SHOW = ROOT / "notebooks" / "track_runs.py"
RESULTS = ROOT / "notebooks" / "results" / "two_cpu_cores"


def train(folder: Path, text: str, epochs: int) -> None:
    """Run the script on two ranks, each a process, up to an epoch."""
    script = folder / "tracked_ddp.py"
    script.write_text(text)
    run = LearnerRun(script, "--epochs", epochs, ranks=2, folder=folder)
    wait_for_runs(run)
    assert run.exit_statuses == [0, 0], [run.lines_of_rank(rank) for rank in range(2)]


def killed_and_resumed(folder: Path, text: str) -> dict[str, list[int]]:
    """Train, lose what was saved after epoch 2 but not what was noted of epoch 3, and go on to 4.

    Returns the steps that TensorBoard shows of each run.
    """
    checkpoint = folder / "last.pt"
    train(folder, text, 2)
    saved = checkpoint.read_bytes()
    train(folder, text, 3)
    checkpoint.write_bytes(saved)
    train(folder, text, 4)
    return {run.name: steps(run, "loss") for run in (folder / "logs").iterdir()}


def steps(run: Path, name: str) -> list[int]:
    """The steps at which TensorBoard has a number of a run."""
    return [event.step for event in events(run, name)]


def events(run: Path, name: str) -> list:
    """What TensorBoard's own reader has of a number."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run))
    reader.Reload()
    return reader.Scalars(name)


def test_a_resumed_run_goes_on_as_the_same_run_and_each_epoch_is_there_once(tmp_path: Path) -> None:
    shown = killed_and_resumed(tmp_path, SCRIPT)
    assert [*shown.values()] == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("right", "wrong", "runs", "noted"),
    [
        (", purge_step=first)", ")", 1, [1, 2, 3, 3, 4]),  # epoch 3 twice
        ('state["run_id"]), p', "uuid.uuid4().hex), p", 3, None),  # a new curve at each start
    ],
)
def test_without_one_of_its_rules_the_curve_is_another(right, wrong, runs, noted, tmp_path: Path) -> None:
    assert SCRIPT.count(right) == 1
    shown = killed_and_resumed(tmp_path, SCRIPT.replace(right, wrong))
    assert len(shown) == runs and (noted is None or [*shown.values()] == [noted])


def test_where_all_ranks_write_each_number_is_there_twice(tmp_path: Path) -> None:
    text = SCRIPT.replace("    if rank == 0:", "    if True:").replace("uuid.uuid4().hex[:8]", "1")
    assert text.count("if True") == 1
    text = text.replace('with_suffix(".part")', 'with_suffix(f".part{rank}")')
    train(tmp_path, text.replace(", purge_step=first)", ")"), 2)  # with it, one rank hides the other's
    assert sorted(steps(tmp_path / "logs" / "run-1", "loss")) == [1, 1, 2, 2]


def test_the_number_is_the_mean_of_all_ranks(tmp_path: Path) -> None:
    """Without the all-reduce it is half of rank 0's: another one."""
    values = []
    for name, text in (("right", SCRIPT), ("wrong", SCRIPT.replace("dist.all_reduce(mean)", "mean"))):
        (folder := tmp_path / name).mkdir()
        train(folder, text, 1)
        [run] = (folder / "logs").iterdir()
        values.append(events(run, "loss")[0].value)
    assert values[0] != pytest.approx(values[1], rel=1e-3) and values[0] > values[1]


def show(*words: object) -> subprocess.CompletedProcess:
    """Run the file that shows records."""
    command = [sys.executable, str(SHOW), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_records_are_shown_as_they_are_up_to_half_a_line(tmp_path: Path) -> None:
    whole = RESULTS / "strong-1x1-cpus1-seed2"
    (cut := tmp_path / "cut").mkdir()
    text = (whole / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text[: len(text) - 9])
    assert show(tmp_path / "logs", whole, cut).returncode == 0
    epochs = text.count("\n")
    assert steps(tmp_path / "logs" / whole.name, "train_loss") == [*range(1, epochs + 1)]
    assert steps(tmp_path / "logs" / "cut", "train_loss") == [*range(1, epochs)]
    for words in ([tmp_path / "logs"], [tmp_path / "logs", tmp_path], [tmp_path / "logs", whole]):
        refused = show(*words)
        assert refused.returncode == 1 and refused.stdout == ""
        one_line(refused.stderr)
