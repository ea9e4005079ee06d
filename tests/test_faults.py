"""The fault matrix: a row of each kind here, and all rows in `make test-all`; `make faults` prints it as a table."""

import pytest
from faults.matrix import Matrix
from faults.rows import ROWS
from faults.slurm_rows import SLURM_ROWS
from real import THOROUGH


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """One folder for all rows: they share the data, the script and the golden runs."""
    return Matrix(tmp_path_factory.mktemp("faults"))


def named(rows):
    """A test for each row; the first of each kind where not all are asked for."""
    kinds = {getattr(check, "func", check): row for *row, check in reversed(rows)}
    first = [row for row in rows if list(row[:2]) == kinds[getattr(row[2], "func", row[2])]]
    return [pytest.param(check, id=f"{fault}, {phase}") for fault, phase, check in (rows if THOROUGH else first)]


@pytest.mark.parametrize("check", named(ROWS))
def test_what_must_hold_after_a_fault_holds(check, matrix):
    check(matrix)


@pytest.mark.parametrize("check", named(SLURM_ROWS))
def test_what_must_hold_after_a_fault_holds_under_slurm(check, matrix, cluster):
    check(matrix)
