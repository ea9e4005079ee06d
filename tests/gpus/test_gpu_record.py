"""Each record of a GPU is held against what docs/gpus.md says: where it contradicts, the page must be mended."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from pages import DOCS, rows
from real import python, until, weekly
from refusals import refused
from simulated import programs, run

from ddp_helpers import ROOT
from ddp_helpers.upkeep import gpu_record
from ddp_helpers.upkeep.gpu_record import COMMITTED, draw_overlap, draw_speed, keep, read_record

STEPS = ROOT / "tests" / "on_gpus"

PAGE = (DOCS / "gpus.md").read_text()


def claims(page):
    """What the page says, by the step that decides it."""
    table = rows(page, "what the course says", "read in", "decided by", "on simulated GPUs")
    return {step.strip("`"): text for text, _, step, _ in table}


# The page's words, and a step's outcome in a record if they are true. When a page is mended, so is its row here.
HOLDS = {
    "scripts": ("warns of nothing", "passed"),
    "equal": ("up to rounding", "passed"),
    "graph": ("the weights of the same steps", "passed"),
    "resume": ("far nearer", "passed"),
    "memory": ("at most 1 GB", "passed"),
    "overlap": ("nothing overlaps", "passed"),
    "timeout": ("SIGABRT", "passed"),
    "restart": ("ends the next attempt", "passed"),
    "killed": ("no sooner", "passed"),
    "full": ("all ranks end", "passed"),
}


def contradictions(record, page):
    """The rows of the page that a record contradicts."""
    told = claims(page)
    taken = {name: (name.partition("[")[0], step) for name, step in record["steps"].items()}  # equal[mnist_ddp]
    return [
        f"{told[row]}: {name} {step['outcome']}, and has seen {step['seen']}"
        for name, (row, step) in taken.items()
        if row in HOLDS and step["outcome"] not in ("skipped", HOLDS[row][1])
    ]


def test_the_page_has_a_row_for_each_step_that_decides_something():
    told = claims(PAGE)
    assert told.keys() == HOLDS.keys()
    assert [step for step, (words, _) in HOLDS.items() if words not in told[step]] == []
    steps = "".join(path.read_text() for path in STEPS.glob("test_*.py"))
    assert [step for step in told if f"def test_{step}(" not in steps] == []


def test_no_page_contradicts_a_record():
    for folder in COMMITTED.glob("*/"):
        record = read_record(folder)
        assert not record["facts"]["simulated"] and not record["facts"]["changed"], "of a committed state"
        assert contradictions(record, PAGE) == [], folder.name


def test_a_record_that_contradicts_the_page_is_noticed():
    """Made by hand: on this pretended GPU the newer class of NCCL overlaps as well as the older."""
    step = {"seen": {"shares": {"older class": 0.8, "newer class": 0.8}}}
    for outcome, expected in (("passed", 0), ("skipped", 0), ("failed", 1)):
        said = contradictions({"steps": {"overlap": step | {"outcome": outcome}}}, PAGE)
        assert len(said) == expected
    assert re.search("nothing overlaps.*newer class': 0.8", said[0])


# ---- the record of `make gpu`, on simulated GPUs: programs are started as on real ones


def make_gpu(cache, out, steps, **env):
    """Run some steps as `make gpu` does, but on two simulated GPUs: the folder of the record, and what was said."""
    words = ["-o", "addopts=", "-v", STEPS, f"--real-gpus={out}", "-k", steps, "--basetemp", out / "work"]
    done = run(cache, [sys.executable, "-m", "pytest", *words], memory_mb=2048, **env)
    [folder] = out.glob("simulated-gpu-*")
    return folder, done


@pytest.fixture(scope="module")
def made(simulated_gpus, tmp_path_factory):
    """The record of two steps, of which one cannot use the data that it is given."""
    out = tmp_path_factory.mktemp("made")
    return make_gpu(simulated_gpus, out, "overlap or example or same_model", EXAMPLE="/no/example.py", TEST_ALL="1")


def test_a_record_has_what_each_step_has_seen_and_how_it_ended(made):
    folder, done = made
    record = read_record(folder)
    facts, steps = record["facts"], record["steps"]
    assert facts["names"] == ["simulated GPU"] * 2 and facts["ranks"] == 2 and facts["simulated"] is True
    assert {name: step["outcome"] for name, step in steps.items()} == {
        "same_model": "passed",
        "overlap": "passed",
        "example": "failed",
    }
    assert done.returncode == 1 and steps["same_model"]["seen"] == {"ranks": 2}
    assert "No such file" in "\n".join(steps["example"]["said"])


def test_a_record_names_neither_this_machine_nor_its_folders(made):
    text = (made[0] / "record.json").read_text()
    for name in (os.uname().nodename, str(ROOT), str(made[0].parent), str(Path.home()) + "/"):
        assert name not in text


def test_a_record_of_simulated_gpus_is_not_kept_and_one_of_real_ones_is_with_its_figure(made, tmp_path, monkeypatch):
    refused(keep, made[0], named=(str(made[0]), "simulated", "make gpu"))
    record = read_record(made[0])
    record["facts"]["simulated"] = False  # pretended, to see what is done then
    (folder := tmp_path / "a-gpu-7").mkdir()
    (folder / "record.json").write_text(json.dumps(record))
    monkeypatch.setattr(gpu_record, "COMMITTED", tmp_path / "committed")
    kept = keep(folder)
    assert kept == tmp_path / "committed" / "a-gpu-1" and not folder.exists()
    assert {path.name for path in kept.iterdir()} == {"record.json", "overlap.png"}
    share = record["steps"]["overlap"]["seen"]["shares"]["gloo"]
    assert f"All-reduces hidden behind computing, of what can be: {share:.0%} (gloo)" in draw_overlap(record).alt


@weekly
def test_the_speed_that_is_measured_can_be_drawn(simulated_gpus, tmp_path):
    folder, done = make_gpu(simulated_gpus, tmp_path, "speed")
    record = read_record(folder)
    assert done.returncode == 0, done.stdout
    assert all(0 < each[-1] < 1 for each in record["steps"]["speed"]["seen"]["accuracy_of_seeds"].values())
    rungs = "|".join(gpu_record._RUNGS)  # which of them is the fastest is this machine's affair
    assert re.match(rf"({rungs}): \d+\.\d times the images per second of (?!\1)({rungs})", draw_speed(record).alt)


def test_the_fastest_is_compared_with_the_slowest_also_where_the_plain_loader_wins():
    rates = {"plain, no workers": 421, "plain, with workers": 400, "fast, batch 64": 257}
    rows = {name: {"images_per_second": [rate]} for name, rate in rates.items()}
    facts = {"gpus": 1, "names": ["a GPU"], "torch": "2.14"}
    title = "plain loader, no workers: 1.6 times the images per second of mnist_fast, batch 64"
    assert title in draw_speed({"facts": facts, "steps": {"speed": {"seen": {"rows": rows}}}}).alt


def test_without_a_gpu_it_says_so_and_tries_nothing(tmp_path):
    done = python("-m", "pytest", "-o", "addopts=", STEPS, f"--real-gpus={tmp_path}", cwd=ROOT)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert "no GPU that torch can use, so nothing was tried" in done.stdout


HANGS = "import subprocess, time\nprint(subprocess.Popen(['sleep', '9999'], start_new_session=True).pid, flush=True)\n"


def test_a_program_that_hangs_is_killed_with_what_it_has_started(simulated_gpus, tmp_path):
    """So a step that has come to its time limit leaves the GPUs to the next one."""
    (tmp_path / "hangs.py").write_text(f"{HANGS}time.sleep(9999)\n")
    with programs(simulated_gpus, 1) as started:
        program = started.start(tmp_path / "log", (tmp_path / "hangs.py",))
        until(lambda: program.said().endswith("\n"), "it has started something")
        left = psutil.Process(int(program.said()))
        assert left.is_running() and not program.has_ended()
        program.kill()
        assert program.status() == -signal.SIGKILL
        until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "what it had started is killed")
