"""Notebook 16's exercises on two and three real ranks: solutions pass, and the judge names each planted mistake."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from asked import cells
from planted_mistakes import ALSO_RIGHT, PLANTED, Planted
from real import THOROUGH

from ddp_helpers import ROOT
from ddp_helpers.lessons.build_it_yourself import exercises
from ddp_helpers.lessons.build_it_yourself.schedule import bubble, length, most_held, schedule
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT

EXERCISES = {exercise.oracle.__name__: exercise for exercise in exercises.EXERCISES}
OF_EACH = len(PLANTED) if THOROUGH else 4  # mistakes planted into each exercise
OF_ALL = [mistake for name in EXERCISES for mistake in [row for row in PLANTED if row.exercise == name][:OF_EACH]]
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
    return EXERCISES[name].verdict(scope[name])


@pytest.mark.parametrize("name", EXERCISES)
def test_the_worked_solution_is_right_and_short_and_a_stub_not_attempted(name: str) -> None:
    solution = source(name)[1]
    assert verdict(name, solution) == RIGHT
    assert EXERCISES[name].verdict(EXERCISES[name].oracle) == NOT_ATTEMPTED
    body = [line for line in solution.splitlines()[1:] if line.strip() and '"""' not in line]
    assert len(body) <= 30


@pytest.mark.parametrize("mistake", OF_ALL, ids=lambda mistake: f"{mistake.exercise}-{mistake.verdict[-30:]}")
def test_the_judge_names_a_planted_mistake(mistake: Planted) -> None:
    solution = source(mistake.exercise)[1]
    for old, new in zip(mistake.old, mistake.new, strict=True):
        assert solution.count(old) >= 1, old
        solution = solution.replace(old, new)
    answer = verdict(mistake.exercise, solution)
    assert answer.startswith("not yet: on ") and mistake.verdict in answer, answer


@pytest.mark.parametrize(("name", "old", "new"), ALSO_RIGHT)
def test_another_right_answer_is_right(name: str, old: str, new: str) -> None:
    solution = source(name)[1]
    assert old in solution
    assert verdict(name, solution.replace(old, new)) == RIGHT


def test_in_a_process_of_a_group_the_judge_says_where_to_run(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        answer = verdict("ring_sum", source("ring_sum")[1])
    finally:
        dist.destroy_process_group()
    assert "without `%%ranks`" in answer


def test_each_exercise_has_mistakes_that_are_told_apart() -> None:
    counts = Counter(mistake.exercise for mistake in PLANTED)
    assert counts.keys() == EXERCISES.keys() and min(counts.values()) >= 5


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 4), (4, 8), (3, 2)])
def test_both_orders_of_a_pipeline_wait_alike_and_the_second_holds_less(stages: int, count: int) -> None:
    first, second = (schedule(stages, count, one_by_one) for one_by_one in (False, True))
    assert length(first) == length(second) == 3 * (count + stages - 1)
    assert bubble(first) == bubble(second) == pytest.approx((stages - 1) / (count + stages - 1))
    assert [most_held(works) for works in first] == [count] * stages
    assert [most_held(works) for works in second] == [min(count, stages - stage) for stage in range(stages)]
