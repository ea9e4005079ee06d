"""`explain` on logs of strangers, which were not used to write its rules: docs/tools.md has the scores."""

import tomllib
from pathlib import Path

import pytest
from explained import answer, explain

from ddp_helpers import ROOT
from ddp_tools.explain.lines import read_logs

LOGS = ROOT / "tests" / "logs"
THREADS = {path.stem: tomllib.loads(path.read_text())["log"] for path in sorted(LOGS.glob("*.toml"))}
EACH = {entry["source"].removeprefix("https://github.com/"): entry for logs in THREADS.values() for entry in logs}


@pytest.mark.parametrize("entry", EACH.values(), ids=EACH)
def test_a_strangers_log_is_explained_rightly_or_not_at_all(tmp_path: Path, entry: dict) -> None:
    verdict = explain(tmp_path, entry["text"])
    assert answer(verdict) in (*entry["expects"], None)
    assert "first" not in entry or verdict.first in (entry["first"], None)


@pytest.mark.parametrize(
    ("name", "least"),
    [("threads", 85), ("threads_later", 20), ("threads_third", 45), ("threads_fourth", 30), ("threads_fifth", 15)],
)
def test_most_logs_of_strangers_are_explained(tmp_path: Path, name: str, least: int) -> None:
    right = [answer(explain(tmp_path, entry["text"])) in entry["expects"] for entry in THREADS[name]]
    assert sum(right) >= least


def test_no_thread_is_quoted_twice_and_none_at_length() -> None:
    assert len(THREADS["threads"]) == 100 and len(EACH) == sum(map(len, THREADS.values()))
    assert all(len(entry["text"].splitlines()) <= 26 for entry in EACH.values())


RUNS = tomllib.loads((LOGS / "clean" / "runs.toml").read_text())["log"]


@pytest.mark.parametrize("entry", RUNS, ids=lambda entry: entry["source"])
def test_in_a_run_that_did_not_fail_no_failure_is_seen(tmp_path: Path, entry: dict) -> None:
    assert answer(explain(tmp_path, entry["text"])) == "clean"
    assert answer(explain(tmp_path, entry["text"] + "MyError: it broke\nTraceback (most recent call last):\n")) is None


def test_a_warning_at_which_a_log_ends_explains_it(tmp_path: Path) -> None:
    tries = (
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node0]:29500 (errno: 110 - timed out).\n"
    )
    assert answer(explain(tmp_path, tries * 3)) == "client-socket"
    assert answer(explain(tmp_path, tries * 3 + "epoch 1: loss 0.3\n")) == "clean"


def test_a_mark_behind_other_text_begins_a_line_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "24/200 [01:08<08:18,  2.83s/it][rank1]: ValueError: odd[rank2]: ValueError: even\n"
    )
    lines = [(line.rank, line.text) for line in read_logs([tmp_path / "job.log"]).lines]
    assert lines[1:] == [(1, "ValueError: odd"), (2, "ValueError: even")] and lines[0][0] is None


def test_a_line_that_reports_another_error_is_explained_by_that_one(tmp_path: Path) -> None:
    watchdog = "[rank0]:[E1 x.cpp:1] [Rank 0] Process group watchdog thread terminated with exception: "
    assert (
        answer(explain(tmp_path, watchdog + "CUDA error: an illegal memory access was encountered"))
        == "illegal-address"
    )
    assert answer(explain(tmp_path, watchdog + "odd")) == "nccl-watchdog-exception"


def test_what_comes_behind_the_end_by_slurm_is_not_its_cause(tmp_path: Path) -> None:
    end = "slurmstepd: error: *** JOB 608 ON node1 CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB REQUEUE ***\n"
    late = "RuntimeError: Connection refused\n"
    assert answer(explain(tmp_path, end + late)) == "slurm-requeue"
    assert answer(explain(tmp_path, late + end)) == "connection-refused"


def test_a_rank_that_its_launcher_ended_is_not_the_first(tmp_path: Path) -> None:
    log = """\
E1125 20:02:16.897000 3993 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) local_rank: 1
Failures:
[1]:
  time      : 2026-11-25_20:02:16
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 4274)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_20:02:16
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 4275)  (SIGABRT)
"""
    verdict = explain(tmp_path, log)
    assert (verdict.first, answer(verdict)) == (1, "sigabrt")


def test_an_error_that_no_rule_knows_comes_before_a_launchers_summary(tmp_path: Path) -> None:
    summary = "srun: error: node1: task 0: Exited with exit code 1\n"
    assert answer(explain(tmp_path, "tool | Error: no licence\n" + summary)) is None
    assert answer(explain(tmp_path, summary)) == "srun-task-exit"
