"""One subpackage for each notebook, with its name: exercises.py, figures.py, its own helpers.

Notebooks call `check(my_function)`, in the driver process or on every rank of a `%%ranks` cell:
it prints whether an answer is right, or what is wrong with it. Right answers are in
`notebooks/solutions`.
"""

import re
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ddp_helpers.launch.screen import on_colour
from ddp_helpers.lessons.exercise import (
    INDENT,
    NOT_ATTEMPTED,
    NOT_YET,
    RIGHT,
    Exercise,
    JudgedExercise,
    short,
)
from ddp_tools import PlainError

_GREEN, _RED = 28, 161  # colours of the first word, of the 256
# JupyterLab breaks a line that is wider than its cell within a word.
_WRAPPER = textwrap.TextWrapper(
    width=78, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
)
# The start of a difference in a verdict that all ranks of a cell share.
_OF_ALL_RANKS = re.compile(r"on \d+ ranks, rank \d+: ")
_LESSONS = Path(__file__).parent


def exercises() -> dict[str, Exercise | JudgedExercise]:
    """Map the names of all exercises of the course to them."""
    by_name: dict[str, Exercise | JudgedExercise] = {}
    for path in sorted(_LESSONS.glob("*/exercises.py")):
        by_name |= _exercises_of(path)
    return by_name


def exercise_called(name: str) -> Exercise | JudgedExercise | None:
    """Return the exercise of this name, None if there is none.

    Imports only the lessons whose exercises mention the name.
    """
    for path in sorted(_LESSONS.glob("*/exercises.py")):
        if name in path.read_text() and name in (known := _exercises_of(path)):
            return known[name]
    return None


def _exercises_of(path: Path) -> dict[str, Exercise | JudgedExercise]:
    """Map the names of one lesson's exercises to them."""
    module = import_module(f"{__name__}.{path.parent.name}.exercises")
    return {exercise.name: exercise for exercise in module.EXERCISES}


def check(answer: Callable) -> None:
    """Print the verdict on a learner's function, which has the name of its exercise.

    Raises PlainError if it is not a function, but its result, say, or if no exercise has its name.
    """
    name = getattr(answer, "__name__", "")
    if not (callable(answer) and name):
        cure = "give the function itself, as in lessons.check(batch_plan)"
        raise PlainError(f"{short(answer)} is not a function: {cure}")
    exercise = exercise_called(name)
    if exercise is None:
        raise PlainError(f"no exercise is called {name}: keep the name that the stub has")
    verdict = exercise.verdict(answer)
    if _rank_0_says(verdict):
        return
    lines = verdict.splitlines()
    if verdict == RIGHT and isinstance(exercise, JudgedExercise):
        lines.append(exercise.unseen)
    text = "\n".join(part for line in lines for part in _WRAPPER.wrap(line))
    for word, colour in ((RIGHT, _GREEN), (NOT_YET, _RED)):
        if text.startswith(word):
            text = f"{on_colour(word, colour)}{text.removeprefix(word)}"
    print(text)


def _rank_0_says(verdict: str) -> bool:
    """Whether this rank of a `%%ranks` cell is not 0, and rank 0 prints the same verdict.

    Ranks compare in step, so all know the first result that differs. An error is known only to
    the rank that it stops, which prints it.
    """
    distributed = sys.modules.get("torch.distributed")
    if not (distributed and distributed.is_initialized() and distributed.get_rank()):
        return False
    return verdict in (RIGHT, NOT_ATTEMPTED) or bool(_OF_ALL_RANKS.search(verdict))
