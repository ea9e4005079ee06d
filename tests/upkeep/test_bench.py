"""The bench says which goals are met; weekly, it runs once at its smallest."""

import json
import os
import sys

import pytest
from real import weekly

from ddp_helpers.upkeep import bench


@pytest.mark.parametrize(
    ("values", "sign", "goal", "verdict"),
    [
        ([1.0, 2.0, 3.0], "<=", 3, "met"),
        ([1.0, 2.0, 3.0], "<=", 1, "MISSED"),
        ([1.0, 2.0, 3.0], "<=", 2.1, "undecided"),
        ([5.0], ">=", 5, "met"),
        ([4.9], ">=", 5, "MISSED"),
        (bench.ratios(lambda: 1.0, lambda: 2.0, times=3), "<=", 0.5, "met"),
    ],
)
def test_a_row_says_whether_its_goal_is_met(values, sign, goal, verdict, capsys):
    row = bench.row("what", values, sign, goal)
    assert verdict in capsys.readouterr().out
    assert row["met"] is {"met": True, "MISSED": False, "undecided": None}[verdict]
    assert row["median"] == sorted(values)[len(values) // 2]
    json.dumps(row, allow_nan=False)


def test_an_interrupt_keeps_what_was_measured_and_a_busy_machine_is_named(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        yield bench.row("the first", [1.0], "<=", 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "_goals", interrupted)
    for load, quiet in ((0, True), (1e9, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        with pytest.raises(KeyboardInterrupt):
            bench.bench()
        assert len(json.loads((tmp_path / "build" / "bench.json").read_text())["rows"]) == 1
        assert ("not quiet" not in capsys.readouterr().out) == quiet


@weekly
def test_each_goal_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench"])  # not pytest's: the flags are read as mnist_ddp reads them
    bench.bench(times=1)
    rows = json.loads((tmp_path / "build" / "bench.json").read_text())["rows"]
    assert len(rows) == 4 and all(row["median"] > 0 for row in rows if "%" not in row["name"])
