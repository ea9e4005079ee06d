"""The bench measures what it says: fair turns, goals met and missed, rows that a record can hold."""

import json

import pytest
import torch

from ddp_helpers.rank.data import datasets
from ddp_helpers.upkeep import messages
from ddp_helpers.upkeep.bench import ladder, training
from ddp_helpers.upkeep.bench.ladder import of_script, picture

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "sign", "goal", "verdict"),
    [
        ([1.0, 2.0, 3.0], "<=", 2, "met"),
        ([1.0, 2.0, 3.0], "<=", 1.9, "MISSED"),
        ([5.0], ">=", 5, "met"),
        ([4.9], ">=", 5, "MISSED"),
        ([4.9], "<=", None, "no goal"),
        ([], "<=", 1, "not measured"),
    ],
)
def test_a_row_says_whether_its_goal_is_met(values, sign, goal, verdict, capsys):
    row = training.row("what", values, sign, goal)
    assert verdict in capsys.readouterr().out
    assert row["met"] is {"met": True, "MISSED": False}.get(verdict)
    assert row["median"] == (sorted(values)[len(values) // 2] if values else None)
    json.dumps(row, allow_nan=False)


def test_what_is_compared_takes_turns():
    called = []
    pairs = training.turns(0, lambda: called.append("a") or 1, lambda: called.append("b") or 2)
    assert pairs == [(1, 2)] * 3 and "".join(called) == "abbaab"


def test_rungs_ranks_and_their_picture(digits, tmp_path, monkeypatch, capsys):
    some = {name: rung for name, rung in ladder.rungs(CPU).items() if name in ("plain loader", "less work")}
    monkeypatch.setattr(ladder, "rungs", lambda device: some)
    rows, said = ladder.climb(digits, CPU, passes=2), capsys.readouterr().out
    assert [row["name"] for row in rows] == list(some) and rows[0]["ratio"] == 1
    for row in rows:
        assert row["middle_half"][0] <= row["median"] <= row["middle_half"][1]
        assert 0 < row["share_of_limit"] < 1.5
        assert row["name"] in said
    beside = of_script("DDP, 2 ranks", [row * 2 for row in rows[1]["images_per_second"]], rows, CPU)
    assert beside["ratio"] == pytest.approx(2 * rows[1]["ratio"])
    assert beside["share_of_limit"] == pytest.approx(2 * rows[1]["share_of_limit"]), "both in the same precision"
    picture([*rows, beside], "digits", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    json.dumps([*rows, beside], allow_nan=False)


def test_every_rung_of_the_ladder_trains(digits):
    train_set, _ = datasets(digits)
    found = {name: rung.trainer(train_set, 128, CPU) for name, rung in ladder.rungs(CPU).items()}
    assert next(iter(found)) == "plain loader" and len(found) >= 5
    rates = ladder.in_turns(found, 2)
    assert all(len(seen) == 2 and min(seen) > 0 for seen in rates.values())


def test_what_is_held_is_each_image_once_in_a_new_order(digits):
    train_set, _ = datasets(digits)
    held = ladder.Held(train_set, 100, CPU, size=32)
    passes = [list(held) for _ in range(2)]
    assert [len(labels) for _, labels in passes[0]] == [32, 32, 32, 4]
    first, second = (torch.cat([images for images, _ in batches]) for batches in passes)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sum(0), second.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held.images[3], train_set[3][0])


def test_the_arithmetic_is_counted():
    forward = 2 * (26 * 26 * 32 * 9 + 24 * 24 * 64 * 288 + 9216 * 128 + 1280)
    assert ladder.operations() == 3 * forward - 2 * 26 * 26 * 32 * 9  # no gradient for the images themselves
    assert ladder.matrix_rate("float32", CPU) > 1e8


def test_ddp_on_one_rank_is_measured(digits, monkeypatch):
    monkeypatch.setattr(training, "turns", lambda seconds, *both: [tuple(one() for one in both)] * 2)
    assert len(training.cost_of_ddp(digits, CPU)) == 1


def test_a_message_is_the_error_without_its_frames():
    assert messages.message("def f(): raise ValueError('one\\ntwo')\nf()") == "ValueError: one\ntwo"
    assert messages.message("pass") == ""
    for code in messages.CAUSES.values():
        compile(code, "cause", "exec")  # they run on a GPU alone: at least they are Python


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record")
def test_without_a_gpu_no_message_is_recorded(capsys):
    with pytest.raises(SystemExit) as stopped:
        messages.record()
    assert stopped.value.code == 2 and "no GPU can be seen here" in capsys.readouterr().err
