"""Exercises: an oracle in plain Python, cases to call it with, and known mistakes.

The `exercises.py` of each lesson builds exercises. `lessons.check` gets one's verdict on a
learner's function, in the driver process or on every rank of a `%%ranks` cell.

To add one: (1) in the notebook, under *Check yourself*, a question with a fold with a hint, and a
cell with the stub, which raises NotImplementedError, and `lessons.check(name)`. (2) In the lesson's
exercises.py an `Exercise` with the oracle, two or more cases, and common mistakes, each under its
hint. For an answer that runs on ranks it is a trial (ranks_judge.py), for a script or a run a
`JudgedExercise`. No two exercises of the course have the same name. A hint is shown if the
mistake's results equal the answer's in *all* cases, so the cases together must tell each mistake
from the right answer and from the others. (3) In notebooks/solutions the right function, with a
line on why. (4) For a trial, two mistakes or more in
tests/lessons/planted_mistakes.py, in a table whose name is added to PLANTED. Then `pytest
tests/lessons -k "NAME or told_apart"`, and execute the notebook. A notebook has three exercises:
replace one of them with a better one.
"""

import copy
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RIGHT, NOT_ATTEMPTED, NOT_YET = "right", "not attempted", "not yet"  # how a verdict starts
INDENT = " " * len(f"{NOT_YET}: ")
SEPARATOR = f"\n{INDENT}"  # aligns the next line of a verdict with the first

Answer = Callable[..., object]  # a learner's function, or one that makes a known mistake

_ABBREVIATED = reprlib.Repr()
_ABBREVIATED.maxlist = _ABBREVIATED.maxtuple = _ABBREVIATED.maxdict = 12
_ABBREVIATED.maxstring = _ABBREVIATED.maxother = 80
short = _ABBREVIATED.repr


@dataclass(frozen=True)
class Exercise:
    """An oracle, the argument tuples it is called with, and known mistakes.

    `traps` maps a hint, which the learner reads, to a function that makes this mistake.
    """

    oracle: Answer
    cases: Sequence[tuple]
    traps: Mapping[str, Answer]

    @property
    def name(self) -> str:
        """Return the oracle's name, which the learner's function has too."""
        return self.oracle.__name__

    def verdict(self, answer: Answer) -> str:
        """Check a learner's function: right, not attempted, or a hint and a wrong result."""
        for case in self.cases:
            expected = self.oracle(*copy.deepcopy(case))
            call = f"{self.name}({', '.join(map(short, case))})"
            try:
                result = answer(*copy.deepcopy(case))
            except NotImplementedError:
                return NOT_ATTEMPTED
            except (Exception, SystemExit) as error:
                return f"{NOT_YET}: {call} ends with {type(error).__name__}: {error}"
            if not same(result, expected):
                comparison = f"gives {short(result)}, and should give {short(expected)}."
                lines = filter(None, [self._hint(answer), f"{call} {comparison}"])
                return f"{NOT_YET}: {SEPARATOR.join(lines)}"
        return RIGHT

    def _hint(self, answer: Answer) -> str:
        """Return the hint of the trap with this answer's outcome in each case, or an empty text."""
        outcomes = [_outcome(answer, case) for case in self.cases]
        for hint, trap in self.traps.items():
            of_trap = (_outcome(trap, case) for case in self.cases)
            if all(map(same, outcomes, of_trap)):
                return hint
        return ""


class NotCheckedError(Exception):
    """This machine lacks something that a checker needs."""


@dataclass(frozen=True)
class JudgedExercise:
    """An exercise with its own `judge`, which runs an answer and lists its mistakes.

    unseen: the line below `right`, on what the checker does not cover.
    """

    name: str
    judge: Callable[[Answer], list[str]]
    unseen: str = ""

    def verdict(self, answer: Answer) -> str:
        """Check a learner's function: right, not attempted, not checked, or its mistakes."""
        try:
            mistakes = self.judge(answer)
        except NotImplementedError:
            return NOT_ATTEMPTED
        except NotCheckedError as error:
            return f"not checked: {error}"
        except (Exception, SystemExit) as error:
            return f"{NOT_YET}: {self.name} ends with {type(error).__name__}: {error}"
        return f"{NOT_YET}: {SEPARATOR.join(mistakes)}" if mistakes else RIGHT


def _outcome(function: Answer, case: tuple) -> object:
    """Call a function with its own copy of a case; return its result, or the type of its error."""
    try:
        return function(*copy.deepcopy(case))
    except (Exception, SystemExit) as error:
        return type(error)


def same(result: object, expected: object) -> bool:
    """Whether two results are equal, numbers with fractions to rounding.

    A list may replace a tuple, and a tensor or an array may replace a list.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(expected, dict):
        if not isinstance(result, dict) or result.keys() != expected.keys():
            return False
        return all(same(result[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        if not isinstance(result, list | tuple | range) or len(result) != len(expected):
            return False
        return all(map(same, result, expected))
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return bool(result == expected)
    if isinstance(result, bool) or not isinstance(result, int | float):
        return False
    return math.isclose(result, expected, rel_tol=1e-6, abs_tol=1e-9)
