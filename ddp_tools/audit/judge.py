"""Run all checks on the notes of the ranks and make the rows of the table.

The audit's command calls it in the driver process, with the notes of all ranks. Needs no torch.
"""

from collections.abc import Callable

from ddp_tools.audit import (
    data_checks,
    evaluation_checks,
    rank_checks,
    state_checks,
    timing_checks,
    training_checks,
)
from ddp_tools.audit.notes import FAIL, NOT_APPLICABLE, OK, UNKNOWN, Finding, Notes, Row

EARLY = "the run ended early; until then: "


def _metrics(ranks: list[Notes]) -> Finding:
    """Metrics of test-set shards are reduced over the ranks, but not as means of unequal shards."""
    together = evaluation_checks.metrics(ranks)
    return together if together.verdict == FAIL else state_checks.averages(ranks) or together


# To add a check: write a function in data_checks.py (training samples), evaluation_checks.py (test
# samples), rank_checks.py (ends, calls, files), training_checks.py (weights, gradients) or
# state_checks.py (buffers, copies), which takes the notes of all ranks and returns a Finding: FAIL
# only if it is wrong for certain, UNKNOWN if the notes do not decide it, NOT_APPLICABLE if the
# script has nothing of the kind. If a note lacks something, add a field or a class in notes.py, and
# have one of the watches write it. Plant a fault that the check finds (PLANTED in
# tests/tools/test_audit.py; docs/tools.md has a row for each check); `TEST_ALL=1 pytest
# tests/tools/test_audit.py` plants all faults, since other checks may fail for the new one.
# Of two checks that fail for one cause, the vaguer is UNKNOWN and points to the other.
CHECKS: dict[str, Callable[[list[Notes]], Finding]] = {
    "exit": rank_checks.end,
    "launch": rank_checks.launch,
    "sharding": data_checks.samples,
    "coverage": data_checks.coverage,
    "shuffle": data_checks.order,
    "evaluation": evaluation_checks.evaluation,
    "replicas": training_checks.replicas,
    "gradients": training_checks.gradients,
    "schedule": training_checks.schedule,
    "finite": training_checks.finite,
    "collectives": rank_checks.collectives,
    "files": rank_checks.files,
    "checkpoint keys": rank_checks.saved_names,
    "rng": rank_checks.random_numbers,
    "metrics": _metrics,
    "straggler": timing_checks.straggler,
}


def judge(ranks: list[Notes]) -> list[Row]:
    """Make all rows. A run that ended early cannot pass a check."""
    rows = [Row(name, *check(ranks)) for name, check in CHECKS.items()]
    if rows[0].verdict == OK:
        return rows
    return [_unseen(row) if row.verdict in (OK, NOT_APPLICABLE) else row for row in rows]


def _unseen(row: Row) -> Row:
    """A row of a run that ended early: it cannot be ok."""
    return row._replace(verdict=UNKNOWN, seen=EARLY * (row.verdict == OK) + row.seen)
