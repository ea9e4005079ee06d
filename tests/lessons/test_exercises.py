"""The exercises: each checker accepts the worked solution and refuses each plausible mistake, with a word about it."""

import re
from pathlib import Path

import pytest
from notebook_texts import asked, cells

from ddp_helpers import ROOT
from ddp_helpers.lessons import check, exercises
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, Exercise, same

EVERY = exercises()
# Those with a judge are run for real in test_planted_mistakes, test_do_it_yourself and test_train_mnist_with_ddp.
EXERCISES = {name: one for name, one in EVERY.items() if not hasattr(one, "judge")}
PATHS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def lesson(name: str) -> str:
    """The lesson that an exercise belongs to, so that `-k shard_the_data` selects all tests of a notebook."""
    return EVERY[name].oracle.__module__.split(".")[-2]


TRAPS = [
    pytest.param(name, told, id=f"{lesson(name)}, {name}: {told}")
    for name, exercise in EXERCISES.items()
    for told in exercise.traps
]


@pytest.mark.parametrize("name", [pytest.param(name, id=f"{lesson(name)}, {name}") for name in EXERCISES])
def test_a_stub_is_not_attempted_and_a_constant_not_enough(name: str) -> None:
    def stub(*_: object) -> None:
        raise NotImplementedError

    exercise = EXERCISES[name]
    assert exercise.verdict(stub) == NOT_ATTEMPTED
    assert exercise.traps, "no plausible mistake is known"
    assert len(exercise.cases) >= 2, "one case can be met by a constant"


@pytest.mark.parametrize(("name", "told"), TRAPS)
def test_a_plausible_mistake_is_refused_with_a_word_about_it(name: str, told: str) -> None:
    exercise = EXERCISES[name]
    verdict = exercise.verdict(exercise.traps[told])
    assert verdict.startswith(f"not yet: {told}\n") and len(told) > 20, "what helps stands first"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_has_three_exercises_with_hints_and_without_their_answers(path: Path) -> None:
    names = asked(path)
    least = 3 if path.stem.partition("_")[0].isdigit() else 1  # an appendix, such as 10b, has one
    assert len(names) >= least
    assert not set(names) - EVERY.keys(), f"no Exercise of this name in exercises.py of {path.stem}'s lesson"
    text = "\n".join(cells(path, "markdown"))
    assert text.count("<details>") == text.count("</details>") >= len(names)
    stubs = [source for source in cells(path, "code") if "NotImplementedError" in source]
    for name in names:
        assert any(f"def {name}(" in source for source in stubs), (
            f"{name} has no stub, or its answer is in the notebook"
        )


def test_each_exercise_is_asked_once() -> None:
    names = [name for path in PATHS for name in asked(path)]
    assert not set(EVERY) - set(names), "in an exercises.py, and asked in no notebook"
    assert len(names) == len(set(names)), "asked twice, in one notebook or in two"


# Those of 05 need ranks that stay, of 07 and 17 a Slurm: they are in files of their own.
@pytest.mark.parametrize(
    "path", [path for path in PATHS if path.stem[:2] not in ("05", "07", "17")], ids=lambda path: path.stem
)
def test_the_worked_solutions_are_right(path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    solution, scope = path.parent / "solutions" / path.name, {}
    assert asked(solution) == asked(path), f"solutions/{path.name} must check what the notebook asks, in its order"
    monkeypatch.chdir(solution.parent)
    for source in cells(solution, "code"):
        exec(source, scope)
    assert capsys.readouterr().out.splitlines().count(f"\x1b[1;38;5;28m{RIGHT}\x1b[0m") == len(asked(path))


def test_an_answer_by_another_name_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"<lambda>.*\bname\b"):
        check(lambda: 1)


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


def test_a_verdict_is_in_colour_and_in_lines_that_no_browser_breaks_within_a_word(capsys) -> None:
    def job_rate(images: int, seconds: float) -> float:
        return images / seconds

    check(job_rate)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("\x1b[1;38;5;161mnot yet\x1b[0m: ") and others
    assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= 78 for line in (first, *others))
    assert all(line.startswith("         ") for line in others)


def test_an_answer_that_breaks_is_quoted() -> None:
    def half(x: float) -> float:
        return x / 2

    verdict = Exercise(half, [(1,)], {}).verdict(lambda x: x / 0)
    assert verdict.startswith("not yet: half(1) ") and verdict.endswith("ZeroDivisionError: division by zero")


def test_an_answer_cannot_spoil_its_own_cases() -> None:
    def largest(values: list) -> int:
        return max(values)

    assert Exercise(largest, [([1, 2],)], {}).verdict(lambda values: values.pop()) == RIGHT
