"""A run that is harmed loses nothing: a row of nearly every kind; `make faults`, weekly by `make test-all`, has all."""

import pytest
from faults.matrix import Matrix
from faults.rows import ROWS, killed_anywhere
from faults.slurm_rows import SLURM_ROWS, cancelled, node_killed, told


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """One folder for all rows: they share the data, the script and the golden runs."""
    return Matrix(tmp_path_factory.mktemp("faults"))


# Weekly: moments by chance; jobs that are cancelled or requeued, which notebooks 11, 11b and test_preemption have.
LONG = {killed_anywhere, cancelled, node_killed, told}


def named(rows):
    """A test for the first row of each kind, but for those that are long."""
    kinds = {getattr(row[2], "func", row[2]): row for row in reversed(rows)}  # a row may hold a partial of its function
    return [
        pytest.param(check, id=f"{fault}, {phase}")
        for function, (fault, phase, check) in kinds.items()
        if function not in LONG
    ]


@pytest.mark.parametrize("check", named(ROWS))
def test_what_must_hold_after_a_fault_holds(check, matrix):
    check(matrix)


@pytest.mark.parametrize("check", named(SLURM_ROWS))
def test_what_must_hold_after_a_fault_holds_under_slurm(check, matrix, cluster):
    check(matrix)
