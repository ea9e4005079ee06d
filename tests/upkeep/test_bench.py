"""The bench says which goals are met; weekly, each of its measurements is made."""

import json

import pytest
from real import weekly

from ddp_helpers.upkeep import bench


@pytest.mark.parametrize(
    ("values", "sign", "goal", "verdict"),
    [
        ([1.0, 2.0, 3.0], "<=", 2, "met"),
        ([1.0, 2.0, 3.0], "<=", 1.9, "MISSED"),
        ([5.0], ">=", 5, "met"),
        ([4.9], ">=", 5, "MISSED"),
        (bench.ratios(lambda: 1.0, lambda: 2.0), "<=", 0.5, "met"),
    ],
)
def test_a_row_says_whether_its_goal_is_met(values, sign, goal, verdict, capsys):
    row = bench.row("what", values, sign, goal)
    assert verdict in capsys.readouterr().out
    assert row["met"] is (verdict == "met") and row["median"] == sorted(values)[len(values) // 2]
    json.dumps(row, allow_nan=False)


@weekly
def test_what_is_measured_is_there(tmp_path, cluster):
    speed = bench.speed(tmp_path, "mnist_fast")
    [run] = tmp_path.glob("mnist_fast*/metrics.jsonl")
    first, second = map(json.loads, run.read_text().splitlines())
    assert speed == second["images_per_second"] != first["images_per_second"]
    assert bench.printed_number("-c", bench.IMPORTS) > 0
    assert len(both := bench.peak_memory(tmp_path)) == 2 and all(100 < peak < 4000 for peak in both)
    assert min(bench.submit_to_step(tmp_path)) > 0
