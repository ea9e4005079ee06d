"""The bench measures what it says: fair turns, goals met and missed, rows that a record can hold."""

import json

import pytest
import torch

from ddp_helpers.upkeep import bench


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


def test_every_goal_has_a_row(tmp_path, monkeypatch):
    asked, real = [], bench.ratios
    monkeypatch.setattr(bench, "ratios", lambda a, b, times=3: real(a, b, 3))
    monkeypatch.setattr(bench, "speed", lambda folder, name, *_, ranks=0: asked.append((name, ranks)) or 1 + ranks)
    rows = bench.goals(tmp_path, torch.device("cpu"))
    assert [row["median"] for row in rows[2:]] == [1.5, 1.5, 1.0] and len(rows[1]["values"]) == 3
    assert {*asked} >= {("mnist_fast", 0), ("mnist_single", 0), ("mnist_ddp", 1), ("mnist_ddp_resumable", 2)}


def test_the_speed_of_a_script_is_that_of_its_record(tmp_path, monkeypatch):
    real = bench.write_digits
    monkeypatch.setattr(bench, "write_digits", lambda root, **_: real(root, train=128, test=50))
    assert bench.speed(tmp_path, "mnist_fast") > 1
