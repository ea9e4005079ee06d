"""The exercises: each is asked once and answered once, and each plausible mistake is refused with a word about it."""

import re
import sys

import nbformat
import pytest
from notebook_texts import asked, cells
from refusals import refused
from solved import answers_to

from ddp_helpers import ROOT
from ddp_helpers.lessons import check, exercises
from ddp_helpers.lessons.exercise import RIGHT, Exercise, same

EVERY = exercises()
# Those with a judge are run for real in test_planted_mistakes, test_do_it_yourself and test_train_mnist_with_ddp.
EXERCISES = {name: one for name, one in EVERY.items() if not hasattr(one, "judge")}
PATHS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def lesson(name: str) -> str:
    """The lesson that an exercise belongs to, so that `-k shard_the_data` selects all tests of a notebook."""
    return EVERY[name].oracle.__module__.split(".")[-2]


@pytest.mark.parametrize("name", [pytest.param(name, id=f"{lesson(name)}, {name}") for name in EXERCISES])
def test_each_plausible_mistake_is_refused_with_a_word_about_it(name: str) -> None:
    exercise = EXERCISES[name]
    assert exercise.traps, "no plausible mistake is known"
    assert len(exercise.cases) >= 2, "one case can be met by a constant"
    verdicts = {told: exercise.verdict(mistake) for told, mistake in exercise.traps.items()}
    other = {told: verdict for told, verdict in verdicts.items() if not verdict.startswith(f"not yet: {told}\n")}
    assert not other, "what helps does not stand first"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebooks_exercises_have_stubs_without_their_answers_which_its_solutions_have(path) -> None:
    """`solved` runs these answers below the notebook's own cells, and sees that each is right."""
    names = asked(path)
    assert names and not set(names) - EVERY.keys(), f"no Exercise of this name in exercises.py of {path.stem}'s lesson"
    stubs = [source for source in cells(path, "code") if "NotImplementedError" in source]
    for name in names:
        assert any(f"def {name}(" in source for source in stubs), f"{name} has no stub, or its answer is here"
    answers = "\n".join(cell.source for cell in answers_to(nbformat.read(path, as_version=4)))
    assert re.findall(r"^lessons\.check\((\w+)\)$", answers, re.M) == names, "in its order, each below its answer"


def test_each_exercise_is_asked_once() -> None:
    assert sorted(name for path in PATHS for name in asked(path)) == sorted(EVERY)


def test_what_is_no_answer_to_an_exercise_is_one_line() -> None:
    refused(check, lambda: 1, named=["<lambda>", "keep the name"])
    for result in ({"per_rank": 4}, None, 7):
        refused(check, result, named=[repr(result), "give the function itself", "lessons.check(batch_plan)"])


def test_an_answer_that_leaves_is_judged() -> None:
    """In the first case, or in a later one, where a wrong result before it is looked for among the mistakes."""
    at_once = EVERY["batch_plan"].verdict(lambda *_: sys.exit(3))
    results = iter(["wrong"])
    later = EVERY["batch_plan"].verdict(lambda *_: next(results, None) or sys.exit(3))
    assert "ends with SystemExit: 3" in at_once and "gives 'wrong'" in later
    assert all(verdict.startswith("not yet: ") for verdict in (at_once, later))


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        (0.1 + 0.2, 0.3, True),
        (1, True, True),
        (True, 1, False),
        (range(3), [0, 1, 2], True),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ("12", [1, 2], False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
        (float("nan"), 1.0, False),
    ],
)
def test_equality_forgives_rounding_and_nothing_else(answer: object, expected: object, equal: bool) -> None:
    assert same(answer, expected) == equal


def test_an_answer_that_breaks_is_quoted_and_none_can_spoil_its_own_cases() -> None:
    def half(x: float) -> float:
        return x / 2

    verdict = Exercise(half, [(1,)], {}).verdict(lambda x: x / 0)
    assert verdict.startswith("not yet: half(1) ") and verdict.endswith("ZeroDivisionError: division by zero")

    def largest(values: list) -> int:
        return max(values)

    assert Exercise(largest, [([1, 2],)], {}).verdict(lambda values: values.pop()) == RIGHT
