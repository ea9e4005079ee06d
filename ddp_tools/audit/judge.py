"""Judge what the ranks' witnesses have noted: the table of checks, and the rows that they make.

The audit's command calls it in the learner's process, with the notes of all ranks. Needs no torch.
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

EARLY = "the run did not come to its end; until then: "


def _metrics(ranks: list[Notes]) -> Finding:
    """What ranks find on shares of a test set comes together, and not as means of unequal ones."""
    together = evaluation_checks.metrics(ranks)
    return together if together.verdict == FAIL else state_checks.averages(ranks) or together


# To add a check: a function of data_checks.py (what ranks are given), evaluation_checks.py (what
# they test), rank_checks.py (what they do), training_checks.py (weights, gradients) or
# state_checks.py (what they hold besides), which takes the notes of all ranks and returns a
# Finding: FAIL only for what is wrong for certain, UNKNOWN if the notes do not say, NOT_APPLICABLE
# if the script has nothing of the kind. What no note says is a field or a class more in notes.py,
# written by one of the watches. Plant a fault that it finds (PLANTED in
# tests/tools/test_audit.py; docs/tools.md has a row for each check); `TEST_ALL=1 pytest
# tests/tools/test_audit.py` plants all: others may fail, too.
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
