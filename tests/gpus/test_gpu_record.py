"""Each record of a GPU is held against what docs/gpus.md says: where it contradicts, the page must be mended."""

import json
import re

from pages import DOCS, rows
from refusals import refused

from ddp_helpers.upkeep.gpu_record import COMMITTED, keep, read_record

PAGE = (DOCS / "gpus.md").read_text()


def claims(page):
    """What the page says, by the step that decides it."""
    table = rows(page, "what the course says", "read in", "decided by", "on simulated GPUs")
    return {step.strip("`"): text for text, _, step, _ in table}


# The page's words, and what a step's `ok` is in a record if they are true. When a page is mended, so is its row here.
HOLDS = {
    "scripts": ("warns of nothing", True),
    "equal": ("up to rounding", True),
    "graph": ("the weights of the same steps", True),
    "resume": ("far nearer", True),
    "memory": ("at most 1 GB", True),
    "overlap": ("nothing overlaps", True),
    "timeout": ("SIGABRT", True),
    "restart": ("ends the next attempt", True),
    "killed": ("no sooner", True),
    "full": ("all ranks end", True),
}


def contradictions(record, page):
    """The rows of the page that a record contradicts."""
    told = claims(page)
    taken = {step: record[step] for step in HOLDS if step in record}
    decided = {step: line for step, line in taken.items() if line["ended"] not in ("interrupted", "no time left")}
    return [
        f"{told[step]}: seen was {line['found']}"
        for step, line in decided.items()
        if line["ok"] not in (None, HOLDS[step][1])
    ]


def test_the_page_has_a_row_for_each_step_that_decides_something():
    told = claims(PAGE)
    assert told.keys() == HOLDS.keys()
    assert [step for step, (words, _) in HOLDS.items() if words not in told[step]] == []


def test_no_page_contradicts_a_record():
    for folder in COMMITTED.glob("*/"):
        record = read_record(folder)
        assert record["facts"]["seen"]["gpus"] >= 1 and not record["facts"]["seen"]["changed"], "of a committed state"
        assert contradictions(record, PAGE) == [], folder.name


def test_a_record_that_contradicts_the_page_is_noticed(tmp_path):
    """Made by hand: on this pretended GPU the newer class of NCCL overlaps as well as the older."""
    line = {"step": "overlap", "ended": "by itself", "found": "hidden: older class 80%, newer class 80%"}
    for ok, expected in ((True, 0), (None, 0), (False, 1)):
        (tmp_path / "record.jsonl").write_text(json.dumps(line | {"ok": ok}) + "\n")
        said = contradictions(read_record(tmp_path), PAGE)
        assert len(said) == expected
    assert re.search("nothing overlaps.*newer class 80%", said[0])


def test_no_figure_is_drawn_from_a_record_of_simulated_gpus(tmp_path):
    """The line is what the step writes on them, and the control what it writes on a GPU; neither has figures."""
    line = {"step": "facts", "ended": "by itself", "seen": {"gpus": 1, "simulated": True}}
    (tmp_path / "record.jsonl").write_text(json.dumps(line) + "\n")
    refused(keep, tmp_path, named=(str(tmp_path), "simulated", "make gpu"))
    (tmp_path / "record.jsonl").write_text(json.dumps(line | {"seen": {"gpus": 1, "simulated": False}}) + "\n")
    keep(tmp_path)
