"""`explain` on logs of strangers, which were not used to write its rules: docs/tools.md has the scores."""

import tomllib
from pathlib import Path

import pytest
from explained import answer, explain

from ddp_helpers import ROOT

LOGS = ROOT / "tests" / "logs"
LEAST = {  # of the logs of a file, that are explained, and rightly
    "threads": 91,
    "threads_later": 24,
    "threads_third": 49,
    "threads_fourth": 34,
    "threads_fifth": 17,
}


@pytest.mark.parametrize("name", LEAST)
def test_logs_of_strangers_are_explained_rightly_or_not_at_all_and_most_are(tmp_path: Path, name: str) -> None:
    right, wrong = 0, []
    for entry in tomllib.loads((LOGS / f"{name}.toml").read_text())["log"]:
        verdict = explain(tmp_path, entry["text"])
        right += answer(verdict) in entry["expects"]
        if answer(verdict) not in (*entry["expects"], None):
            wrong.append(f"{entry['source']}: {answer(verdict)}, not {entry['expects']}")
        if "first" in entry and verdict.first not in (entry["first"], None):
            wrong.append(f"{entry['source']}: rank {verdict.first} first, not {entry['first']}")
    assert not wrong, "\n".join(wrong)
    assert right >= LEAST[name]


def test_no_file_of_logs_is_forgotten() -> None:
    assert {path.stem for path in LOGS.glob("*.toml")} == LEAST.keys()


def test_in_a_run_that_did_not_fail_no_failure_is_seen(tmp_path: Path) -> None:
    failed = "MyError: it broke\nTraceback (most recent call last):\n"
    for entry in tomllib.loads((LOGS / "clean" / "runs.toml").read_text())["log"]:
        assert answer(explain(tmp_path, entry["text"])) == "clean", entry["source"]
        assert answer(explain(tmp_path, entry["text"] + failed)) is None, entry["source"]
