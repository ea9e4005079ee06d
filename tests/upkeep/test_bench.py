"""The bench says which goals are met; weekly, each of its measurements is made."""

import json
import os
import sys

import pytest
import torch
from real import weekly

from ddp_helpers.upkeep import bench


@pytest.mark.parametrize(
    ("values", "sign", "goal", "verdict"),
    [
        ([1.0, 2.0, 3.0], "<=", 3, "met"),
        ([1.0, 2.0, 3.0], "<=", 1, "MISSED"),
        ([1.0, 2.0, 3.0], "<=", 2.1, "undecided"),
        ([-24.0, 3.0, 59.0], ">=", 3.1, "undecided"),
        ([5.0], ">=", 5, "met"),
        ([4.9], ">=", 5, "MISSED"),
        (bench.ratios(lambda: 1.0, lambda: 2.0), "<=", 0.5, "met"),
    ],
)
def test_a_row_says_whether_its_goal_is_met(values, sign, goal, verdict, capsys):
    row = bench.row("what", values, sign, goal)
    assert verdict in capsys.readouterr().out
    assert row["met"] is {"met": True, "MISSED": False, "undecided": None}[verdict]
    assert row["median"] == sorted(values)[len(values) // 2]
    json.dumps(row, allow_nan=False)


def test_the_cost_of_ddp_is_measured_with_all_flags_that_a_training_reads(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])  # not pytest's: the flags are read as mnist_ddp reads them
    assert len(bench._cost_of_ddp(torch.device("cpu"), times=1)) == 1


def test_an_interrupt_keeps_what_was_measured_and_a_busy_machine_is_named(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "ratios", interrupted)  # the second row's
    monkeypatch.setattr(bench, "IMPORTS", "print(0.1)")
    for load, quiet in ((0, True), (1e9, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        with pytest.raises(KeyboardInterrupt):
            bench.bench()
        [row] = json.loads((tmp_path / "build" / "bench.json").read_text())["rows"]
        assert row["name"].startswith("import the helpers") and len(row["values"]) == 3
        assert ("not quiet" not in capsys.readouterr().out) == quiet


@weekly
def test_what_is_measured_is_there(tmp_path, cluster):
    speed = bench.speed(tmp_path, "mnist_fast")
    [run] = tmp_path.glob("mnist_fast*/metrics.jsonl")
    first, second = map(json.loads, run.read_text().splitlines())
    assert speed == second["images_per_second"] != first["images_per_second"]
    assert bench.printed_number("-c", bench.IMPORTS) > 0
    assert len(both := bench.peak_memory(tmp_path)) == 2 and all(100 < peak < 4000 for peak in both)
    assert min(bench.submit_to_step(tmp_path)) > 0
