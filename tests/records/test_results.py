"""The recorded runs that the course ships, and the command that records more."""

import json
import re
import shutil

import pytest
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.records import runs
from ddp_helpers.upkeep import records as keeping

FOLDERS = sorted(path for path in (ROOT / "notebooks" / "results").iterdir() if path.is_dir())
RUNS = [run for folder in FOLDERS for run in runs.run_folders(folder)]
PATH = re.compile(r'"(/|[A-Z]:\\)[\w./-]+"')


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_a_recorded_run_is_whole_and_says_who_made_it(folder):
    run = runs.read_run(folder)
    assert run.state == "done" and run.problems == [] and len(run.epochs) == run.spec["epochs"]
    assert run.machine and run.env["dataset"] in ("MNIST", "digits") and (run.env.get("started") or run.job["started"])
    assert re.fullmatch(r"ddp_helpers \d+\.\d+\.\d+( \([0-9a-f]{7,}\))?", run.env["made_from"]), "nothing was changed"
    for file in folder.iterdir():
        assert not PATH.search(file.read_text()) and file.stat().st_size < 20_000


def test_each_sweep_is_told_of():
    told = (ROOT / "notebooks" / "results" / "README.md").read_text()
    assert FOLDERS and all(f"`{folder.name}`" in told for folder in FOLDERS)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with one finished run on a machine whose paths and names nobody should see."""
    monkeypatch.setattr(keeping, "RESULTS", ROOT / "build" / f"results-{tmp_path.name}")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    ranks = [{"rank": 0, "local_rank": 0, "host": "secret-host", "device": "cpu", "chip": "a chip"}]
    contents = {"spec": {"data": "/secret/place/data"}, "status": {"state": "done"}}
    contents["env"] = {"world_size": 1, "dataset": "digits", "ranks": ranks}
    for name, content in contents.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    (run / "metrics.jsonl").write_text('{"epoch": 1}\n')
    (run / "mnist_cnn.pt").write_bytes(b"weights")
    return run.parent


def test_keep_copies_the_record_and_neither_paths_nor_hosts_nor_weights(made):
    target = keeping.keep(made, "here")
    try:
        text = "".join(path.read_text() for path in target.rglob("*.json"))
        assert runs.read_run(target / "one").epochs == [{"epoch": 1}] and "secret" not in text and "a chip" in text
        assert "secret-host" in (made / "one" / "env.json").read_text(), "the control: it was there"
        assert not list(target.rglob("*.pt"))
    finally:
        keeping.shutil.rmtree(target.parent)


DAMAGE = {
    "no end": ("status.json", "{", "is left out: status.json: JSONDecodeError"),
    "no epochs": ("metrics.jsonl", None, "is left out: metrics.jsonl: IsADirectoryError"),
    "no settings": ("spec.json", "[]", "is kept without what cannot be read: spec.json: "),
    "half a line": ("metrics.jsonl", '{"epoch": 1}\n{"ep', "read: metrics.jsonl line 2: half-written, left out"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_keep_says_in_one_line_what_it_cannot_read_and_keeps_the_others(case, made, capsys):
    file, content, line = DAMAGE[case]
    damaged, waits = (shutil.copytree(made / "one", made / name) for name in ("two", "three"))
    (damaged / file).unlink()
    (damaged / file).mkdir() if content is None else (damaged / file).write_text(content)
    for path in waits.iterdir():  # a job in the queue has no record yet, and misses none
        path.unlink()
    (waits / "job.json").write_text('{"state": "PENDING"}')
    try:
        assert keeping.keep(made, "here") == keeping.RESULTS / "here"
        err = capsys.readouterr().err
        assert err.startswith("'two' is ") and line in err and err.count("\n") == 1
        kept = {path.name for path in (keeping.RESULTS / "here").iterdir()}
        assert kept == ({"one"} if "left out: " in line else {"one", "two"})
    finally:
        shutil.rmtree(keeping.RESULTS)


def test_a_run_of_which_nothing_can_be_read_is_named_before_keep_stops(made, capsys):
    for path in (made / "one").iterdir():
        path.write_bytes(b"\xff{")
    with pytest.raises(SystemExit):
        keeping.keep(made, "here")
    left_out, stopped = capsys.readouterr().err.splitlines()
    assert all(part in left_out for part in ("'one'", "spec.json: UnicodeDecodeError", "env.json: "))
    assert " 0 finished runs" in stopped and not keeping.RESULTS.exists()


def test_keep_refuses_a_folder_without_runs(tmp_path):
    refused(keeping.keep, tmp_path, "nothing", named=[str(tmp_path), "0 finished runs"])
    assert not (ROOT / "notebooks" / "results" / "nothing").exists()
