"""Run records, those of the course and those of a script of one's own, as rows of one table."""

import json

import pytest

from ddp_helpers import ROOT
from ddp_helpers.records import runs, scaling

RANKS = [{"rank": rank, "local_rank": rank % 2, "host": f"node{rank // 2}", "device": "cpu"} for rank in range(4)]
JOB = {"nodes": 2, "tasks_per_node": 1, "cpus_per_task": 3}
# What the files of a record hold; and what its row says: ranks, nodes, the batch of a rank, of all, and the kind.
ROWS = {
    "of all": (
        {"batch_size": 64},
        {"world_size": 4, "ranks": RANKS},
        {},
        (4, 2, 16, 64, "strong"),
    ),
    "of each, as the job computed": (
        {"batch_size": 64},
        {"world_size": 4, "ranks": RANKS, "global_batch_size": 64},
        {"job": JOB, "batch_size_per_rank": 16},
        (4, 2, 16, 64, "weak"),
    ),
    "of each, by a flag of its own": (
        {"batch_size": 64, "batch_size_per_rank": 16},
        {"world_size": 4, "ranks": RANKS},
        {},
        (4, 2, 16, 64, "weak"),
    ),
    "of all, by scripts with that flag": (
        {"batch_size": 64, "batch_size_per_rank": None},
        {"world_size": 4},
        {},
        (4, None, 16, 64, "strong"),
    ),
    "one rank": ({"batch_size": 64}, {"device": "cpu"}, {}, (1, 1, 64, 64, "strong")),
    "own, in a job": ({"batch_size": 64}, {"world_size": 2}, {"job": JOB}, (2, 2, 32, 64, "strong")),
    "own, its job says how many": ({"batch_size": 64}, {"device": "cpu"}, {"job": JOB}, (2, 2, 32, 64, "strong")),
    "own, without a job": ({"batch_size": 64}, {"world_size": 2}, {}, (2, None, 32, 64, "strong")),
    "own, said where it ran": ({"bs": 16}, {"world_size": 2, "global_batch_size": 32}, {}, (2, None, 16, 32, "strong")),
    "own, nothing said": ({"bs": 16}, {"world_size": 2}, {}, (2, None, None, None, "strong")),
    "shared unevenly": ({"batch_size": 63}, {"world_size": 2}, {}, (2, None, None, 63, "strong")),
    "unreadable": ({"batch_size": "64"}, {"world_size": 4}, {}, (4, None, None, None, "strong")),
}


def record(folder, spec, env, job=None, lines=({"epoch": 1},)):
    """Write a record of these files."""
    folder.mkdir(parents=True)
    for name, content in {"spec": spec, "env": env, "status": {"state": "done"}, "job": job}.items():
        if content:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("case", ROWS)
def test_nodes_and_batch_are_right_or_empty(case, tmp_path):
    *files, expected = ROWS[case]
    row = runs.read_run(record(tmp_path / "a", *files)).row()
    assert tuple(row[name] for name in ("world_size", "nodes", "batch_per_rank", "global_batch", "scaling")) == expected


def test_the_committed_records_keep_their_meaning():
    table = runs.table(ROOT / "notebooks" / "results" / "two_cpu_cores").drop_duplicates("run")
    for row in table.to_dict("records"):
        kind, shape, *_ = row["run"].split("-")
        nodes, ranks = map(int, shape.split("x"))
        assert (row["scaling"], row["nodes"], row["world_size"]) == (kind, nodes, nodes * ranks)
        assert row["global_batch" if kind == "strong" else "batch_per_rank"] == 64


def test_any_name_of_an_epoch_is_a_column_and_a_metric_but_counts_seconds_and_flags(tmp_path):
    line = {"train_loss": 1.0, "test_loss": 1.0, "train_top2": 0.5, "test_top2": 0.5, "train_max_error": 2.0}
    line |= {"perplexity": 3.0, "note": "warm", "train_samples": 10, "seconds": 1.0, "data_seconds": 0.1, "number": 7}
    for lr in (0.1, 0.3):
        epochs = [line | {"epoch": epoch, "lr": lr} for epoch in (1, 2)]
        record(tmp_path / f"lr{lr}", {"batch_size": 64, "lr": lr, "train_share": lr}, {"world_size": 2}, None, epochs)
    table = runs.table(tmp_path)
    assert set(line) <= set(table.columns)
    assert scaling.metrics(table) == ["test_loss", "perplexity", "test_top2", "train_max_error"]
