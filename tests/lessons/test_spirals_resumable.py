"""spirals_resumable.py: stopped or killed it ends with the same bits, also with a loop of one's own; and its record."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from changed_text import replaced
from real import THOROUGH

from ddp_helpers import ROOT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_helpers.records import runs

SCRIPT = ROOT / "notebooks" / "spirals_resumable.py"
PAGE = (ROOT / "docs" / "your-script.md").read_text()
[WEIGHTED] = re.findall(r"^```python\n(class WeightedShare.*?)^```$", PAGE, re.M | re.S)
PARTS = '"optimizer": optimizer, "schedule": schedule'
# What a reader puts into the marked places: a sampler, BatchNorm and dropout, a schedule that steps each batch, an EMA
# that is tested; and samples that are dicts, with noise from the dice of whoever loads them. And an accident.
OWN = [
    ("def spirals(", f"{WEIGHTED}\n\n\ndef spirals("),
    (
        "    return TensorDataset(torch.view_as_real(torch.polar(radius, angle)), arm)\n",
        "    points = torch.view_as_real(torch.polar(radius, angle))\n"
        '    return Noisy({"x": x, "y": y} for x, y in zip(points, arm))\n\n\n'
        "class Noisy(list):\n    def __getitem__(self, index):\n        sample = super().__getitem__(index)\n"
        '        return sample | {"x": sample["x"] + 0.05 * torch.randn(2)}\n',
    ),
    ('x, y = batch  # or for a dict, batch["x"]: as your data are', 'x, y = batch["x"], batch["y"]'),
    ("for x, y in test_batches:", "for x, y in map(dict.values, test_batches):"),
    ("DistributedSampler(train_set)", "WeightedShare(torch.linspace(1, 3, 960), 960)"),
    (
        "hidden = nn.Linear(2, 64), nn.ReLU()",
        "hidden = nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU()",
    ),
    ("ConstantLR(optimizer, factor=1)", "OneCycleLR(optimizer, 0.1, args.epochs * steps)"),
    (
        '    # YOUR EMA: average = AveragedModel(model, ...) on every rank, and "average" in parts.\n',
        "    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
        "    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)\n",
    ),
    (PARTS, f'{PARTS}, "average": average'),
    ("# YOUR EMA: average.update_parameters(model)", "average.update_parameters(model)"),
    ("in model.buffers():", "in [*model.buffers(), *average.buffers()]:"),
    ("right += (model(x.", "right += (average(x."),
    ("torch.save(model.cpu().state_dict(), weights", "torch.save(average.state_dict(), weights"),
    (
        "            optimizer.step()\n",
        "            optimizer.step()\n"
        '            if os.environ.get("ACCIDENT", "").startswith(f"{rank} {step} "):\n'
        '                os.kill(os.getpid(), int(os.environ["ACCIDENT"].split()[2]))\n',
    ),
    ("    main()\n", '    main()\n    print("at the end", *map(signal.getsignal, SIGNALS))\n'),
]
STEPS = 20  # in an epoch


def with_changes(path, *changes):
    """Write the script with changes, and give its path."""
    path.write_text(replaced(SCRIPT.read_text(), changes))
    return path


def start(script, ranks, *words, accident="", requeue=""):
    """Run the script to its end in its folder: each rank's exit status, and all that was said.

    accident: a rank, after which step, and the number of the signal that it then sends itself.
    """
    flags = ["--epochs", 3, "--vote-every", 4, "--save-every", 8, "--save", "own.pt", *words]
    env = {"ACCIDENT": accident, "REQUEUE_FILE": requeue or None}
    run = LearnerRun(script, *flags, ranks=ranks, folder=Path(script).parent, env=env)
    wait_for_runs(run)
    return run.exit_statuses, [line for rank in range(ranks) for line in run.lines_of_rank(rank)]


def newest(folder):
    """The newest checkpoint of a run."""
    return max(folder.glob("runs/spirals/checkpoints/step-*.pt"))


def bits(value):
    """A state, however deep, in which tensors are bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items() if name != "progress"}
    return [*map(bits, value)] if isinstance(value, list | tuple) else value


def ending(folder):
    """What a run came to: the parts in its newest checkpoint, and the weights that it saved."""
    return [bits(torch.load(path, weights_only=True)) for path in (newest(folder), folder / "own.pt")]


def test_killed_told_to_stop_and_damaged_it_ends_with_the_bits_of_a_run_that_nobody_stopped(tmp_path):
    (golden := tmp_path / "golden").mkdir()
    statuses, said = start(with_changes(golden / "own.py", *OWN), 3)
    assert statuses == [0] * 3, said
    assert said.count("at the end 1 1") == 3, "a late signal ends no rank that is done"

    script, record = shutil.copy(golden / "own.py", tmp_path), tmp_path / "runs" / "spirals"
    statuses, said = start(script, 3, accident=f"1 {STEPS + 10} 9")
    assert statuses[1] == -9 and newest(tmp_path).stem == "step-00000024", said
    assert runs.read_run(record).state == "failed"

    request = tmp_path / "requeue"
    statuses, said = start(script, 3, accident=f"2 {STEPS + 13} 12", requeue=str(request))
    assert "begins after step 24" in said and statuses == [75] * 3, said
    assert newest(tmp_path).stem == "step-00000036", "the vote after the step in which one rank was told"
    assert runs.read_run(record).state == "preempted" and "SIGUSR2" in request.read_text()

    content = bytearray(newest(tmp_path).read_bytes())
    weights = torch.load(newest(tmp_path), weights_only=True)["model"]["0.weight"]
    content[content.index(weights.numpy().tobytes())] ^= 1
    newest(tmp_path).write_bytes(content)
    torch.load(newest(tmp_path), weights_only=True)  # does not notice
    statuses, said = start(script, 3)
    assert "begins after step 32" in said and any("step-00000036.pt is damaged" in line for line in said), said
    assert statuses == [0] * 3 and (record / "checkpoints" / "step-00000036.damaged").exists()

    assert ending(tmp_path) == ending(golden)
    run, table = runs.read_run(record), runs.table(record)
    assert (run.state, run.problems, [*table["epoch"]]) == ("done", [], [1, 2, 3])
    row = table.iloc[-1]
    assert (row["world_size"], row["nodes"], row["batch_per_rank"], row["global_batch"]) == (3, 1, 16, 48)
    assert [*table["test_accuracy"]] == [*runs.table(golden / "runs" / "spirals")["test_accuracy"]]


TESTED = "                if heard[-1]:"  # after each batch of the test


def test_told_to_stop_while_it_tests_a_rank_breaks_off_and_the_next_attempt_tests_again(tmp_path):
    """A test may be longer than the warning; ranks may have unequally many batches, here 84, 83 and 83."""
    told = "        model.eval()\n", '        model.eval()\n        if os.environ["ACCIDENT"] == f"{rank} {epoch}":\n'
    told = told[0], told[1] + "            os.kill(os.getpid(), signal.SIGUSR2)\n"
    changes = told, (TESTED, f'                print("tests")\n{TESTED}'), ("test_indices), 100)", "test_indices), 1)")
    (golden := tmp_path / "golden").mkdir()
    assert start(with_changes(golden / "own.py", *changes), 3)[0] == [0] * 3
    script = shutil.copy(golden / "own.py", tmp_path)
    for epoch in (1, 3):
        statuses, said = start(script, 3, accident=f"0 {epoch}")
        assert statuses == [75] * 3 and newest(tmp_path).stem == f"step-{STEPS * epoch:08}", said
        assert said.count("tests") == 250 * (epoch - 1) + 1 + 83 + 83, "rank 0 broke off"
    assert start(script, 3)[0] == [0] * 3 and ending(tmp_path) == ending(golden)
    table, expected = (runs.table(folder / "runs" / "spirals") for folder in (tmp_path, golden))
    assert [*table["test_accuracy"]] == [*expected["test_accuracy"]] and (table["images_per_second"] > 0).all()


FORGOTTEN = {  # what is left out; on how many ranks it shows
    "nothing": (1, "", ""),
    "the optimizer": (1, '"optimizer": optimizer, ', ""),
    "the loader's generator": (1, '{"generator": generator, ', "{"),
    "the pass that is thrown away": (3, "    batch_loss(ddp_model, batch, device).backward()\n", ""),
    "the schedule": (1, ', "schedule": schedule', ""),
    "the EMA": (1, ', "average": average', ""),
    "the dice": (1, "            torch.manual_seed(1 + step * world_size + rank)  # no state to save\n", ""),
    "the place in the epoch": (1, "[done * share :]", "[: len(sampler) - done * share]"),
}


@pytest.mark.parametrize("what", FORGOTTEN if THOROUGH else [*FORGOTTEN][:4])
def test_control_one_thing_that_is_forgotten_spoils_the_bits(what, tmp_path):
    ranks, line, other = FORGOTTEN[what]
    (golden := tmp_path / "golden").mkdir()
    script = with_changes(tmp_path / "own.py", *OWN, *[(line, other)] * bool(line))
    statuses = [
        start(shutil.copy(script, golden), ranks)[0],
        start(script, ranks, accident=f"{ranks - 1} {STEPS + 10} 12")[0],
        start(script, ranks)[0],
    ]
    assert statuses == [[0] * ranks, [75] * ranks, [0] * ranks]
    assert (ending(tmp_path) == ending(golden)) == (what == "nothing")


def test_nobody_stopped_it_trains_to_the_bits_of_spirals_ddp(tmp_path):
    statuses, said = start(shutil.copy(SCRIPT, tmp_path), 2)
    assert statuses == [0, 0], said
    plain = LearnerRun(SCRIPT.with_name("spirals_ddp.py"), "--epochs=3", "--save=ddp.pt", ranks=2, folder=tmp_path)
    wait_for_runs(plain)
    weights, others = (torch.load(tmp_path / name, weights_only=True) for name in ("own.pt", "ddp.pt"))
    assert bits(weights) == bits(others) and set(plain.lines_of_rank(0)) <= {*said}


def test_a_loss_that_is_not_finite_stops_all_ranks_and_is_not_saved(tmp_path):
    statuses, said = start(shutil.copy(SCRIPT, tmp_path), 2, "--lr", 1e30)
    assert statuses == [1, 1] and sum("is not finite" in line for line in said) == 2, said
    run = runs.read_run(tmp_path / "runs" / "spirals")
    assert run.state == "failed" and "not finite" in run.status["why"]
    assert not [*tmp_path.glob("runs/spirals/checkpoints/*")]


def test_a_folder_with_another_run_is_left_alone(tmp_path):
    script = shutil.copy(SCRIPT, tmp_path)
    assert start(script, 1)[0] == [0]
    before = newest(tmp_path).stat().st_mtime_ns
    for words, named in ((["--lr", 0.2], "different flags"), (["--run-dir", "new"], "--save own.pt")):
        statuses, said = start(script, 1, *words)
        assert statuses == [2] and len(said) == 1 and named in said[0], said
    assert newest(tmp_path).stat().st_mtime_ns == before
    statuses, said = start(script, 1)
    assert statuses == [0] and "begins after step 60" in said, "started once more, a run that is done stays so"
