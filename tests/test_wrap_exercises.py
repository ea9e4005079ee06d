"""The exercises of notebook 05 run on two ranks: right answers pass on both, and each mistake is told what it did."""

import pytest
from asked import asked, cells
from real import LIMIT

from ddp_helpers import ROOT
from ddp_helpers.launch import ranks
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT
from ddp_helpers.lessons.wrap_the_model.exercises import EXERCISES

TRAPS = [(place, told) for place, exercise in enumerate(EXERCISES) for told in exercise.traps]
SOLUTION = ROOT / "notebooks" / "solutions" / "05_wrap_the_model.ipynb"
STUB = "def stub(*_):\n    raise NotImplementedError\n"


@pytest.fixture(scope="module", autouse=True)
def two():
    ranks.start(2)
    yield
    ranks.end()


def verdicts(place: int, answer: str) -> list[str]:
    """What each of two ranks says of an answer: an expression in which `exercise` is the exercise."""
    lines = ["from ddp_helpers.lessons.wrap_the_model.exercises import EXERCISES", STUB]
    lines += [f"exercise = EXERCISES[{place}]", f"verdict = exercise.verdict({answer})"]
    ranks.ranks_magic(f"2 limit={LIMIT}", "\n".join(lines))
    return ranks.pull("verdict")


@pytest.mark.parametrize("place", range(len(EXERCISES)))
def test_the_oracle_is_right_and_the_stub_not_attempted(place):
    assert verdicts(place, "exercise.oracle") == [RIGHT] * 2
    assert verdicts(place, "stub") == [NOT_ATTEMPTED] * 2
    alone = EXERCISES[place].verdict(EXERCISES[place].oracle)
    assert alone.startswith("not yet: ") and "ranks" in alone


@pytest.mark.parametrize(("place", "told"), TRAPS)
def test_a_plausible_mistake_is_told_what_it_did(place, told):
    answers = verdicts(place, f"exercise.traps[{told!r}]")
    assert all(verdict.startswith("not yet: ") and told in verdict for verdict in answers), answers


def test_the_worked_solutions_are_right(capsys):
    assert asked(SOLUTION) == asked(SOLUTION.parents[1] / SOLUTION.name) == [one.oracle.__name__ for one in EXERCISES]
    for source in cells(SOLUTION, "code"):
        line, _, cell = source.partition("\n")
        if line.startswith("%%ranks "):
            ranks.ranks_magic(line.removeprefix("%%ranks "), cell)
    assert capsys.readouterr().out.count(RIGHT) == 2 * len(EXERCISES)
