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
    ratios = bench.ratios(lambda: called.append("a") or 1, lambda: called.append("b") or 2)
    assert ratios == [0.5] * 3 and "".join(called) == "abbaab"


def test_every_goal_has_a_row(tmp_path, monkeypatch):
    asked, real = [], bench.ratios
    monkeypatch.setattr(bench, "ratios", lambda a, b, times=3: real(a, b, 3))
    monkeypatch.setattr(bench, "speed", lambda folder, name, *_, ranks=0: asked.append((name, ranks)) or 1 + ranks)
    monkeypatch.setattr(bench, "printed_number", lambda *words: asked.append((words[1], 0)) or 0.5)
    monkeypatch.setattr(bench, "submit_to_step", lambda folder: [])  # as where there is no Slurm
    monkeypatch.setattr(bench, "peak_memory", lambda folder: [1000.0, 1100.0])
    rows = bench.goals(tmp_path, torch.device("cpu"))
    assert [row["median"] for row in rows[3:]] == [1.5, 1.5, 1.0, None, 1050.0] and len(rows[2]["values"]) == 3
    assert {*asked} >= {
        ("mnist_fast", 0),
        ("mnist_ddp", 0),
        ("mnist_ddp", 1),
        ("mnist_ddp_resumable", 2),
    }


def test_the_speed_of_a_script_is_that_of_its_record(tmp_path, monkeypatch):
    real = bench.write_digits
    monkeypatch.setattr(bench, "write_digits", lambda root, **_: real(root, train=128, test=50))
    speed = bench.speed(tmp_path, "mnist_fast")
    [run] = tmp_path.glob("mnist_fast*/metrics.jsonl")
    first, second = map(json.loads, run.read_text().splitlines())
    assert speed == second["images_per_second"] != first["images_per_second"]
    assert bench.printed_number("-c", bench.IMPORTS) > 0


def test_the_memory_of_two_ranks_and_a_jobs_first_step(tmp_path, monkeypatch, cluster):
    real = bench.write_digits
    monkeypatch.setattr(bench, "write_digits", lambda root, **_: real(root, train=768, test=50))
    assert len(both := bench.peak_memory(tmp_path)) == 2 and all(100 < peak < 4000 for peak in both)
    monkeypatch.setattr(bench, "range", lambda _: [0], raising=False)  # one job of three
    assert bench.submit_to_step(tmp_path)[0] > 0
