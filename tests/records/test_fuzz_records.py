"""Ten thousand damaged run records: each is read, what is not whole is named, and nothing is invented."""

import json
from contextlib import redirect_stderr, suppress
from io import StringIO

import pytest
from fuzzing import INPUTS, fuzz, put
from refusals import outcome

from ddp_helpers import ROOT
from ddp_helpers.jobs.files import job_from_record, read_job_record
from ddp_helpers.jobs.job import Job
from ddp_helpers.records import runs, scaling

REAL = ROOT / "notebooks" / "results" / "two_cpu_cores" / "strong-2x2-cpus1-seed1"
WHOLE = {path.name: path.read_bytes() for path in REAL.iterdir()}
NAMES = {name.partition(".")[0] for name in WHOLE}
NESTED = b'{"a":' * 20_000
SCALAR = (str, int, float, type(None))


def damaged(choices, content):
    """A file of a record with its bytes cut or changed, or nested without an end."""
    return choices.damaged(content) if choices.below(8) else content[: choices.below(40)] + NESTED


def record(choices):
    """One or two of a real record's files, damaged; None stands for one that is missing."""
    names = [choices.one(sorted(WHOLE)) for _ in range(1 + choices.below(2))]
    return {name: damaged(choices, WHOLE[name]) if choices.below(12) else None for name in names}


@pytest.fixture
def folder_with(tmp_path):
    """Makes the record in a folder that of the last input, whole but for these files."""
    before = dict(WHOLE)
    for name, content in WHOLE.items():
        (tmp_path / name).write_bytes(content)

    def write(files):
        for name in {*before, *files}:
            put(tmp_path / name, files.get(name, WHOLE[name]))
        before.clear()
        before.update(files)
        return tmp_path

    return write


def readable(content):
    """Whether the whole, or each line, is a JSON object."""
    text = content.decode(errors="replace")
    for parts in ([text], text.splitlines()):
        with suppress(ValueError, RecursionError):
            return all(isinstance(json.loads(part), dict) for part in parts)
    return not text.strip()


def test_every_record_is_read_and_gives_a_row(folder_with):
    named, silent = [], []

    def check(files):
        run = runs.read_run(folder_with(files))
        row = run.row()
        assert all(isinstance(value, SCALAR) for value in row.values()) and isinstance(run.state, str)
        assert row["machine"] == run.machine and row["nodes"] == run.nodes
        assert all(isinstance(epoch, dict) and type(epoch["epoch"]) is int for epoch in run.epochs)
        assert all(problem.isprintable() and problem.partition(".")[0] in NAMES for problem in run.problems)
        for name, content in files.items():
            told = any(problem.startswith(name) for problem in run.problems)
            unneeded = name == "job.json" or (name == "metrics.jsonl" and run.status)  # no epoch yet
            assert told or unneeded if content is None else told or readable(content)
            (named if told else silent).append(name)

    fuzz(record, check)
    assert set(named) == set(silent) == set(WHOLE), "each file is found wrong, and is not where it can be used"
    assert runs.read_run(REAL).problems == []


def test_every_record_goes_into_the_table_and_the_study(folder_with):
    def check(files):
        folder = folder_with(files)
        with redirect_stderr(StringIO()) as err:
            table = runs.table(folder)
        assert len(err.getvalue().splitlines()) == len(runs.read_run(folder).problems) or not len(table)
        if len(table):
            scaling.left_out(table)
            outcome(lambda: scaling.per_run(table))

    fuzz(record, check, least=INPUTS // 5)


def test_job_json_is_a_job_or_is_refused(folder_with):
    taken, left = [], []

    def check(content):
        said, line = outcome(read_job_record, folder_with({"job.json": content}))
        (left if line else taken).append(content)
        if line:
            assert "job" in line
        else:
            assert isinstance(said["state"], str) and (said["job_id"] is None or said["job_id"].isprintable())
            assert said["job_id"] or isinstance(job_from_record(said), Job)

    def job(choices):
        if choices.below(2):
            return damaged(choices, WHOLE["job.json"])
        content = json.loads(WHOLE["job.json"]) | choices.one([{}, {"job_id": None}])  # submitted, or not yet
        changed = choices.one([content, content["job"]])
        changed[choices.one(sorted(changed))] = choices.value()
        return json.dumps(content).encode()

    fuzz(job, check)
    assert min(len(taken), len(left)) > INPUTS / 10
