"""Notebook 16's exercises on two and three real ranks: solutions pass, and the judge names each planted mistake."""

from collections import Counter
from collections.abc import Callable

import pytest
from asked import cells
from planted_mistakes import PLANTED, Planted

from ddp_helpers import ROOT
from ddp_helpers.lessons.build_it_yourself import functions, pipeline, replicas, ring, sharded_layer, sharded_optimizer
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, Project

JUDGES = {
    "ring_sum": ring.JUDGE,
    "ddp_by_hand": replicas.DDP_JUDGE,
    "overlap": replicas.BUCKETS_JUDGE,
    "zero_1": sharded_optimizer.JUDGE,
    "shard_layer": sharded_layer.JUDGE,
    "sync_batch_norm": functions.NORM_JUDGE,
    "parallel_mlp": functions.PARALLEL_JUDGE,
    "pipeline_step": pipeline.JUDGE,
}
SOLUTION = ROOT / "notebooks" / "solutions" / "16_build_it_yourself.ipynb"


def source(name: str) -> tuple[str, str]:
    """The imports of the solutions, and the cell that solves an exercise, without its check."""
    imports, *solutions = cells(SOLUTION, "code")
    [solution] = [each for each in solutions if f"\ndef {name}(" in f"\n{each}"]
    return imports, solution.partition("\n\n\nlessons.check(")[0]


def verdict(name: str, solution: str) -> str:
    """What the judge says of the source of an answer."""
    scope: dict[str, Callable] = {}
    exec(f"{source(name)[0]}\n{solution}", scope)
    return Project(scope[name], [], {}, JUDGES[name]).verdict(scope[name])


@pytest.mark.parametrize("name", JUDGES)
def test_the_worked_solution_is_right_and_short_and_a_stub_not_attempted(name: str) -> None:
    def stub(*_: object) -> None:
        raise NotImplementedError

    solution = source(name)[1]
    assert verdict(name, solution) == RIGHT
    assert Project(stub, [], {}, JUDGES[name]).verdict(stub) == NOT_ATTEMPTED
    assert len([line for line in solution.splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("mistake", PLANTED, ids=lambda mistake: f"{mistake.exercise}-{mistake.verdict[-30:]}")
def test_the_judge_names_a_planted_mistake(mistake: Planted) -> None:
    solution = source(mistake.exercise)[1]
    for old, new in zip(mistake.old, mistake.new, strict=True):
        assert solution.count(old) >= 1, old
        solution = solution.replace(old, new)
    found = verdict(mistake.exercise, solution)
    assert found.startswith("not yet: on ") and mistake.verdict in found, found


def test_each_exercise_has_mistakes_that_are_told_apart() -> None:
    counts = Counter(mistake.exercise for mistake in PLANTED)
    assert counts.keys() == JUDGES.keys() and min(counts.values()) >= 5
