"""`make save-runs` copies whole records without what is private; the recorded runs that the course ships are such."""

import re
import shutil

import pytest
from refusals import refused
from run_folders import write_run

from ddp_helpers import ROOT
from ddp_helpers.records import runs
from ddp_helpers.upkeep import make_records

FOLDERS = sorted(path for path in (ROOT / "notebooks" / "results").iterdir() if path.is_dir())
PATH = re.compile(r'"(/|[A-Z]:\\)[\w./-]+"')
MADE_FROM = re.compile(r"ddp_helpers \d+\.\d+\.\d+( \([0-9a-f]{7,}\))?")  # nothing was changed


def lacks(run):
    """What a recorded run is to have and has not."""
    texts = [file.read_text() for file in run.folder.iterdir()]
    has = {
        "an end": run.state == "done" and not run.problems and len(run.epochs) == run.spec["epochs"],
        "its machine and data": run.machine and run.env["dataset"] in ("MNIST", "digits"),
        "its date": run.env.get("started") or run.job["started"],
        "who made it": MADE_FROM.fullmatch(run.env["made_from"]),
        "no path": not any(map(PATH.search, texts)),
        "a small size": max(map(len, texts)) < 20_000,
    }
    return [name for name, it_has in has.items() if not it_has]


def test_the_recorded_runs_are_whole_and_say_who_made_them():
    shipped = [runs.read_run(path) for folder in FOLDERS for path in runs.run_folders(folder)]
    failures = [f"{run.folder.parent.name}/{run.folder.name}: {lacks(run)}" for run in shipped if lacks(run)]
    assert not failures, "\n".join(failures)
    told = (ROOT / "notebooks" / "results" / "README.md").read_text()
    assert len(shipped) > 30 and all(f"`{folder.name}`" in told for folder in FOLDERS)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with one finished run on a machine whose paths and names nobody should see."""
    monkeypatch.setattr(make_records, "ROOT", tmp_path)
    monkeypatch.setattr(make_records, "RESULTS", tmp_path / "results")
    ranks = [{"rank": 0, "local_rank": 0, "host": "secret-host", "device": "cpu", "chip": "a chip"}]
    env = {"world_size": 1, "dataset": "digits", "ranks": ranks}
    run = write_run(tmp_path / "runs" / "one", spec={"data": "/secret/place/data"}, status={"state": "done"}, env=env)
    (run / "mnist_cnn.pt").write_bytes(b"weights")
    return run.parent


def test_keep_copies_the_record_and_neither_paths_nor_hosts_nor_weights(made):
    target = make_records.keep(made, "here")
    text = "".join(path.read_text() for path in target.rglob("*.json"))
    assert runs.read_run(target / "one").epochs == [{"epoch": 1}] and "secret" not in text and "a chip" in text
    assert "secret-host" in (made / "one" / "env.json").read_text(), "the control: it was there"
    assert not list(target.rglob("*.pt"))
    refused(make_records.keep, made, "here", named=[str(made), "results/here", "a new name"])


DAMAGE = {
    "no end": ("status.json", "{", "is left out: status.json: JSONDecodeError"),
    "no epochs": ("metrics.jsonl", None, "is left out: metrics.jsonl: IsADirectoryError"),
    "no settings": ("spec.json", "[]", "is kept without what cannot be read: spec.json: "),
    "half a line": ("metrics.jsonl", '{"epoch": 1}\n{"ep', "read: metrics.jsonl line 2: half-written, left out"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_keep_says_in_one_line_what_it_cannot_read_and_keeps_the_others(case, made, capsys):
    file, content, line = DAMAGE[case]
    damaged = shutil.copytree(made / "one", made / "two") / file
    damaged.unlink()
    damaged.mkdir() if content is None else damaged.write_text(content)
    (made / "waits").mkdir()  # a job in the queue has no record yet, and misses none
    (made / "waits" / "job.json").write_text('{"state": "PENDING"}')
    kept = {path.name for path in make_records.keep(made, "here").iterdir()}
    err = capsys.readouterr().err
    assert err.startswith("'two' is ") and line in err and err.count("\n") == 1
    assert kept == ({"one"} if "left out: " in line else {"one", "two"})


def test_a_run_of_which_nothing_can_be_read_is_named_before_keep_stops(made, capsys):
    for path in (made / "one").iterdir():
        path.write_bytes(b"\xff{")
    with pytest.raises(SystemExit):
        make_records.keep(made, "here")
    left_out, stopped = capsys.readouterr().err.splitlines()
    assert all(part in left_out for part in ("'one'", "spec.json: UnicodeDecodeError", "env.json: "))
    assert " 0 finished runs" in stopped and not make_records.RESULTS.exists()
