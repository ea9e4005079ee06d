"""Mistakes that are planted into the worked solutions are told, by real ranks; other right answers are right."""

import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import pytest
import torch.distributed as dist
from notebook_texts import cells
from planted_mistakes import ALSO_RIGHT, PLANTED, PLANTED_HERE, Planted
from real import LIMIT, THOROUGH

from ddp_helpers import ROOT
from ddp_helpers.launch import ranks
from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons import exercises
from ddp_helpers.lessons.build_it_yourself.schedule import bubble, length, most_held, schedule
from ddp_helpers.lessons.exercise import RIGHT

EVERY = exercises()
EXERCISES = [name for name, each in EVERY.items() if hasattr(each, "judge") and "ranks_judge" in each.judge.__module__]
OF_EACH = len(PLANTED) if THOROUGH else 2  # mistakes planted into each exercise
OF_ALL = [mistake for name in EXERCISES for mistake in [row for row in PLANTED if row.exercise == name][:OF_EACH]]
OF_ALL += PLANTED_HERE
SOLUTIONS = ROOT / "notebooks" / "solutions"


@cache
def source(name: str) -> tuple[str, str]:
    """The imports of the solutions, and the cell that solves an exercise, without its check."""
    for path in SOLUTIONS.glob("*.ipynb"):
        found = [re.sub(r"^%%.*\n", "", cell) for cell in cells(path, "code")]
        for cell in found:
            if f"\ndef {name}(" in f"\n{cell}":
                imports = next((each for each in found if "from ddp_helpers import lessons" in each), "")
                return imports, cell.partition("\n\n\nlessons.check(")[0]
    raise LookupError(name)


def changed(mistake: Planted) -> str:
    """The cell that solves an exercise, with a mistake planted."""
    solution = source(mistake.exercise)[1]
    for old, new in zip(mistake.old, mistake.new, strict=True):
        assert solution.count(old) >= 1, old
        solution = solution.replace(old, new)
    return solution


def verdict(name: str, solution: str) -> str:
    """What the judge says of the source of an answer."""
    scope: dict[str, Callable] = {}
    exec(compile(f"{source(name)[0]}\n{solution}", "a cell", "exec"), scope)
    return EVERY[name].verdict(scope[name])


@pytest.mark.parametrize("name", EXERCISES)
def test_the_worked_solution_is_right(name: str) -> None:
    assert verdict(name, source(name)[1]) == RIGHT


@pytest.mark.parametrize("mistake", OF_ALL, ids=lambda mistake: f"{mistake.exercise}-{mistake.verdict[-30:]}")
def test_a_planted_mistake_is_told_by_the_comparison_that_shows_it(mistake: Planted) -> None:
    answer = verdict(mistake.exercise, changed(mistake))
    assert answer.startswith("not yet: ") and mistake.verdict in answer, answer
    if mistake not in PLANTED_HERE:
        assert re.search(r"on [2-4] ranks(, rank \d)?: ", answer), "where"


@pytest.mark.parametrize(("name", "old", "new"), ALSO_RIGHT)
def test_another_right_answer_is_right(name: str, old: str, new: str) -> None:
    solution = source(name)[1]
    assert old in solution
    assert verdict(name, solution.replace(old, new)) == RIGHT


def test_in_a_cell_of_ranks_they_judge_and_say_the_same() -> None:
    rows = [row for row in PLANTED if row.exercise == "average_in_one"]
    mistake, error = rows[0], next(row for row in rows if "frozen" in row.verdict)
    lines = [*source(mistake.exercise)[0].splitlines(), "verdicts = []"]
    answers = source(mistake.exercise)[1], changed(mistake), changed(error)
    for answer in answers:
        lines += [answer, "verdicts += [lessons.exercises()['average_in_one'].verdict(average_in_one)]"]
    ranks.start(2)
    try:
        ranks.ranks_magic(f"2 limit={LIMIT}", "\n".join(lines))
        [first, second] = ranks.pull("verdicts")
    finally:
        ranks.end()
    assert first[:2] == second[:2] == [RIGHT, first[1]] and mistake.verdict in first[1]
    assert error.verdict in first[2] and "rank 0, line " in first[2] and "rank 1, line " in second[2]


def test_a_slow_start_is_no_hang(monkeypatch) -> None:
    start = Processes.call

    def call(ranks, function, *arguments, **options):
        def late():
            time.sleep(6)
            function(*arguments)

        start(ranks, late, **options)

    monkeypatch.setattr(Processes, "call", call)
    assert on_ranks(2, dist.get_rank, patience=5) == [0, 1]


def test_an_answer_that_waits_says_so_while_it_waits(tmp_path) -> None:
    """The ranks end when something has been printed, and not before."""
    sign = tmp_path / "sign"

    class Screen(StringIO):
        def write(self, text: str) -> int:
            sign.touch()
            return super().write(text)

    def wait() -> None:
        while not sign.exists():
            time.sleep(0.1)

    with redirect_stdout(Screen()) as screen:
        on_ranks(2, wait, patience=30)
    assert screen.getvalue() == "the ranks wait for each other, or work: up to 30 s\n"


def test_each_exercise_has_mistakes_that_are_told_apart() -> None:
    told = {name: {row.verdict for row in PLANTED if row.exercise == name} for name in EXERCISES}
    few = [name for name, texts in told.items() if len(texts) < 2]
    assert few == [], "plant two mistakes or more of each in planted_mistakes.py, in a table that PLANTED names"
    assert {row.exercise for row in PLANTED} <= told.keys()


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 4), (4, 8), (3, 2)])
def test_both_orders_of_a_pipeline_wait_alike_and_the_second_holds_less(stages: int, count: int) -> None:
    first, second = (schedule(stages, count, one_by_one) for one_by_one in (False, True))
    assert length(first) == length(second) == 3 * (count + stages - 1)
    assert bubble(first) == bubble(second) == pytest.approx((stages - 1) / (count + stages - 1))
    assert [most_held(works) for works in first] == [count] * stages
    assert [most_held(works) for works in second] == [min(count, stages - stage) for stage in range(stages)]
