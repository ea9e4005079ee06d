"""Records, of the course's scripts and of others, become rows of one table; what is damaged is named and left out."""

import json

import pytest
from run_folders import write_run

from ddp_helpers.records import runs, scaling

FOUR = {"world_size": 4, "ranks": [{"local_rank": rank % 2, "device": "cpu"} for rank in range(4)]}
TWO = {"world_size": 2}
B64 = {"batch_size": 64}
JOB = {"job": {"nodes": 2, "ranks_per_node": 1, "cpus_per_rank": 3}}
# What spec.json, env.json and job.json hold; and what the row says: ranks, nodes, batch of a rank, of all, the kind.
ROWS = {
    "of all": (B64, FOUR, None, (4, 2, 16, 64, "strong")),
    "of each, as the job computed": (
        B64,
        FOUR | {"global_batch_size": 64},
        JOB | {"batch_size_per_rank": 16},
        (4, 2, 16, 64, "weak"),
    ),
    "of each, by a flag of its own": (B64 | {"batch_size_per_rank": 16}, FOUR, None, (4, 2, 16, 64, "weak")),
    "of all, by scripts with that flag": (
        B64 | {"batch_size_per_rank": None},
        {"world_size": 4},
        None,
        (4, None, 16, 64, "strong"),
    ),
    "one rank": (B64, {"device": "cpu"}, None, (1, 1, 64, 64, "strong")),
    "own, in a job": (B64, TWO, JOB, (2, 2, 32, 64, "strong")),
    "own, its job says how many": (B64, {"device": "cpu"}, JOB, (2, 2, 32, 64, "strong")),
    "the same, as of before December 2026": (
        B64,
        {"device": "cpu"},
        {"job": {"nodes": 2, "tasks_per_node": 1}},
        (2, 2, 32, 64, "strong"),
    ),
    "own, without a job": (B64, TWO, None, (2, None, 32, 64, "strong")),
    "own, said where it ran": ({"bs": 16}, TWO | {"global_batch_size": 32}, None, (2, None, 16, 32, "strong")),
    "own, nothing said": ({"bs": 16}, TWO, None, (2, None, None, None, "strong")),
    "shared unevenly": ({"batch_size": 63}, TWO, None, (2, None, None, 63, "strong")),
}


@pytest.mark.parametrize("case", ROWS)
def test_nodes_and_batch_are_right_or_empty(case, tmp_path):
    spec, env, job, expected = ROWS[case]
    row = runs.read_run(write_run(tmp_path / "a", spec=spec, env=env, job=job)).row()
    assert tuple(row[name] for name in ("world_size", "nodes", "batch_per_rank", "global_batch", "scaling")) == expected


def test_any_name_of_an_epoch_is_a_column_and_a_metric_but_counts_seconds_and_flags(tmp_path):
    line = {"train_loss": 1.0, "test_loss": 1.0, "train_top2": 0.5, "test_top2": 0.5, "train_max_error": 2.0}
    line |= {"perplexity": 3.0, "note": "warm", "train_samples": 10, "seconds": 1.0, "data_seconds": 0.1, "number": 7}
    for lr in (0.1, 0.3):
        epochs = [line | {"epoch": epoch, "lr": lr} for epoch in (1, 2)]
        write_run(tmp_path / f"lr{lr}", epochs, spec=B64 | {"lr": lr, "train_share": lr}, env=TWO)
    table = runs.table(tmp_path)
    assert set(line) <= set(table.columns)
    assert scaling.metrics(table) == ["test_loss", "perplexity", "test_top2", "train_max_error"]


def test_a_table_has_the_tasks_of_an_array_and_not_their_parent(tmp_path):
    job = {"job": {"array": ["1", "2"], "cpus_per_rank": 3}, "state": "COMPLETED", "seconds": 4.0}
    write_run(tmp_path / "a", (), job=job)
    old = job | {"job": {"cpus_per_task": 3}}  # as the records of before December 2026 are
    for task, its_job in ("0", job), ("1", old):
        write_run(tmp_path / f"a-{task}", spec=B64, env=TWO, status={"state": "done"}, job=its_job | {"task": task})
    table = runs.table(tmp_path)
    rows = table[["run", "state", "cpus_per_rank", "job_seconds"]].to_dict("split")["data"]
    assert rows == [["a-0", "done", 3, 4.0], ["a-1", "done", 3, 4.0]]


# By the word of Slurm on its job, and the state that it recorded itself: the state of a run.
ENDS = {
    ("FAILED", "running"): "failed",
    ("NODE_FAIL", "running"): "failed",
    ("TIMEOUT", "running"): "timed out",
    ("OUT_OF_MEMORY", "running"): "out of memory",
    ("CANCELLED", "running"): "cancelled",
    ("FAILED", "preempted"): "preempted",  # it left with an error so that it is started again
    ("COMPLETED", "running"): "running",
    ("COMPLETED", None): "done, no record",
    ("PENDING", None): "pending",
    (None, "done"): "done",
    (None, None): "unknown",
}


def test_the_state_is_slurms_where_it_ended_the_job(tmp_path, capsys):
    for number, (word, said) in enumerate(ENDS):
        status, job = said and {"state": said}, word and {"state": word}
        write_run(tmp_path / f"{number:02}", (), spec=B64, env=TWO, status=status or {}, job=job)
    table = runs.table(tmp_path)
    assert dict(zip(ENDS, table["state"], strict=True)) == ENDS and "epoch" not in table
    assert not capsys.readouterr().err


NO_EPOCH = ['{"epoch": 2, "train_lo', "{", '{"epoch": "2"}', "[1]", "{}", "null", "12", '"epoch"', "\ufffd"]


def test_what_is_damaged_is_named_in_one_line_and_the_rest_is_read(tmp_path, capsys):
    write_run(tmp_path / "a", spec=B64, env=TWO, status={"state": "done"})
    damaged = write_run(tmp_path / "b", spec=B64, env=TWO, status={"state": "done"})
    (damaged / "env.json").write_text('{"world')
    (damaged / "job.json").write_text("[]")
    lines = ['{"epoch": 1}', *NO_EPOCH, '{"epoch": 20}']
    (damaged / "metrics.jsonl").write_bytes("\n".join([*lines, ""]).encode() + b'\xff\xfe{"epoch": 1}')
    table = runs.table(tmp_path)
    rows = table[["run", "state", "epoch"]].to_dict("split")["data"]
    assert rows == [["a", "done", 1], ["b", "done", 1], ["b", "done", 20]]
    wrong = ["b: env.json", "b: job.json", *(f"b: metrics.jsonl line {number}" for number in (*range(2, 11), 12))]
    assert [": ".join(line.split(": ")[:2]) for line in capsys.readouterr().err.splitlines()] == wrong


LINE = {"epoch": 1, "images_per_second": 1.0, "seconds": 1.0}
# What one file of a whole record holds, and what the line names that leaves the run out.
NO_NUMBERS = {
    "spec.json": ({"batch_size": "64"}, "batch_size is '64'"),
    "env.json": ({"world_size": [2]}, "world_size is [2]"),
    "job.json": ({"job": {"nodes": "2"}}, "nodes is '2'"),
    "metrics.jsonl": (LINE | {"epoch": 2, "test_accuracy": "0.9"}, "test_accuracy is '0.9'"),
}


@pytest.mark.parametrize("file", NO_NUMBERS)
def test_a_run_with_a_text_where_a_number_must_be_is_left_out_and_named(file, tmp_path, capsys):
    content, named = NO_NUMBERS[file]
    for name in "ab":
        write_run(tmp_path / name, [LINE], spec=B64, env=TWO, status={"state": "done"}, job=JOB)
    with (tmp_path / "b" / file).open("a" if file == "metrics.jsonl" else "w") as damaged:
        json.dump(content, damaged)
    table = runs.table(tmp_path)
    assert capsys.readouterr().err == f"b: {file}: {named}, no number: the run is left out\n"
    assert scaling.per_run(table)["run"].tolist() == ["a"]
    assert scaling.left_out(table) == "1 run left out: 1 damaged"


def test_a_script_of_ones_own_may_say_other_things_in_its_own_way(tmp_path, capsys):
    for number, ranks in enumerate((2, [0, 1], [{"chip": 5}])):
        env, status = TWO | {"ranks": ranks, "chip": 5}, {"state": "done"}
        write_run(tmp_path / str(number), [LINE], spec={"nodes": "all"}, env=env, status=status, job={"job": "12345"})
    assert scaling.per_run(runs.table(tmp_path))["world_size"].tolist() == [2] * 3 and not capsys.readouterr().err


def test_runs_of_one_name_in_two_folders_stay_two(tmp_path):
    for ranks in (1, 2):
        lines = [{"epoch": 1, "images_per_second": 1.0, "seconds": 1.0}]
        write_run(tmp_path / str(ranks) / "n", lines, spec=B64, env={"world_size": ranks}, status={"state": "done"})
    table = runs.table(tmp_path / "1", tmp_path / "2")
    assert scaling.per_run(table)["world_size"].tolist() == [1, 2]
