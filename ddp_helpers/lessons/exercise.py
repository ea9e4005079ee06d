"""What an exercise is: an oracle in plain Python, the cases it is asked, and mistakes that are worth a word."""

import copy
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RIGHT, NOT_ATTEMPTED = "right", "not attempted"
SEPARATOR = "\n         "  # the next line of a verdict stands below the first
SHORT = reprlib.Repr()
SHORT.maxlist = SHORT.maxtuple = SHORT.maxdict = 12
SHORT.maxstring = SHORT.maxother = 80


@dataclass(frozen=True)
class Exercise:
    """An oracle, the arguments it is called with, and plausible mistakes, each under what the learner is told of it."""

    oracle: Callable
    cases: Sequence[tuple]
    traps: Mapping[str, Callable]

    def verdict(self, answer: Callable) -> str:
        """One line about a learner's function: right, not attempted, or what it gives and why that is not it."""
        for case in self.cases:
            expected = self.oracle(*copy.deepcopy(case))
            call = f"{self.oracle.__name__}({', '.join(map(SHORT.repr, case))})"
            try:
                found = answer(*copy.deepcopy(case))
            except NotImplementedError:
                return NOT_ATTEMPTED
            except Exception as error:
                return f"not yet: {call} ends with {type(error).__name__}: {error}"
            if not same(found, expected):
                asked = f"not yet: {call} gives {SHORT.repr(found)}, and should give {SHORT.repr(expected)}."
                return f"{asked} {self.hint(answer)}".rstrip()
        return RIGHT

    def hint(self, answer: Callable) -> str:
        """Return what is told of a wrong answer whose mistake is a known one: it gives, or fails, as the trap does."""
        given = [outcome(answer, case) for case in self.cases]
        for told, trap in self.traps.items():
            if all(same(one, outcome(trap, case)) for one, case in zip(given, self.cases, strict=True)):
                return told
        return ""


@dataclass(frozen=True)
class Project(Exercise):
    """An exercise without an oracle to compare with: `judge` runs the answer, and gives a line for what is missing."""

    judge: Callable[[Callable], list[str]]

    def verdict(self, answer: Callable) -> str:
        """Return the verdict on a learner's function: right, not attempted, or all that is missing, a line each."""
        try:
            lines = self.judge(answer)
        except NotImplementedError:
            return NOT_ATTEMPTED
        except (Exception, SystemExit) as error:
            return f"not yet: {self.oracle.__name__} ends with {type(error).__name__}: {error}"
        return f"not yet: {SEPARATOR.join(lines)}" if lines else RIGHT


def outcome(function: Callable, case: tuple) -> Any:
    """Return what a function gives, or the kind of error with which it ends."""
    try:
        return function(*copy.deepcopy(case))
    except Exception as error:
        return type(error)


def same(found: Any, expected: Any) -> bool:
    """Equality, to rounding where numbers have fractions; a list may stand for a tuple, and a tensor for a list."""
    if hasattr(found, "tolist"):
        found = found.tolist()
    if isinstance(expected, dict):
        keys_agree = isinstance(found, dict) and found.keys() == expected.keys()
        return keys_agree and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        lengths_agree = isinstance(found, list | tuple | range) and len(found) == len(expected)
        return lengths_agree and all(map(same, found, expected))
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return bool(found == expected)
    numbers = isinstance(found, int | float) and not isinstance(found, bool)
    return numbers and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
