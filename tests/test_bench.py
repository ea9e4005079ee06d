"""The bench measures what it says: fair turns, goals met and missed, rows that a record can hold."""

import json

import pytest
import torch

from ddp_helpers.rank.data import datasets
from ddp_helpers.upkeep import bench

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "sign", "goal", "verdict"),
    [
        ([1.0, 2.0, 3.0], "<=", 2, "met"),
        ([1.0, 2.0, 3.0], "<=", 1.9, "MISSED"),
        ([5.0], ">=", 5, "met"),
        ([4.9], ">=", 5, "MISSED"),
    ],
)
def test_a_row_says_whether_its_goal_is_met(values, sign, goal, verdict, capsys):
    row = bench.row("what", values, sign, goal)
    assert verdict in capsys.readouterr().out
    assert row["met"] is (verdict == "met") and row["median"] == sorted(values)[len(values) // 2]
    json.dumps(row, allow_nan=False)


def test_what_is_compared_takes_turns():
    called = []
    found = bench.ratios(lambda: called.append("a") or 1, lambda: called.append("b") or 2)
    assert found == [0.5] * 3 and "".join(called) == "abbaab"


def test_rungs_scripts_and_their_picture(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "speed", lambda folder, name, ranks=1: 1000.0 * ranks)
    rows, said = bench.climb(tmp_path, datasets(digits)[0], CPU, times=2), capsys.readouterr().out
    names = [row["name"] for row in rows]
    assert names[0] == "plain loader" and rows[0]["ratio"] == 1 and len(names) >= 8
    for row in rows:
        assert row["middle_half"][0] <= row["median"] <= row["middle_half"][1]
        assert row["share_of_limit"] > 0 and row["name"] in said
    one, two = rows[-2:]
    assert two["ratio"] == pytest.approx(2 * one["ratio"])
    assert two["share_of_limit"] == pytest.approx(2 * one["share_of_limit"]), "both in the same precision"
    bench.picture(rows, "digits", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    json.dumps(rows, allow_nan=False)


def test_the_speed_of_a_script_is_that_of_its_record(tmp_path, monkeypatch):
    real = bench.write_digits
    monkeypatch.setattr(bench, "write_digits", lambda root, **_: real(root, train=128, test=50))
    assert bench.speed(tmp_path, "mnist_ddp", "--global-batch-size", 64, ranks=2) > 1
    assert bench.speed(tmp_path, "mnist_fast") > 1


def test_what_is_held_is_each_image_once_in_a_new_order(digits):
    train_set, _ = datasets(digits)
    held = bench.Held(train_set, 100, CPU, size=32)
    passes = [list(held) for _ in range(2)]
    assert [len(labels) for _, labels in passes[0]] == [32, 32, 32, 4]
    first, second = (torch.cat([images for images, _ in batches]) for batches in passes)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sum(0), second.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held.images[3], train_set[3][0])


def test_the_arithmetic_is_counted():
    forward = 2 * (26 * 26 * 32 * 9 + 24 * 24 * 64 * 288 + 9216 * 128 + 1280)
    assert bench.operations() == 3 * forward - 2 * 26 * 26 * 32 * 9  # no gradient for the images themselves


def test_ddp_on_one_rank_is_measured(digits):
    assert len(bench.cost_of_ddp(datasets(digits)[0], CPU, times=2)) == 2
