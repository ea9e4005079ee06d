"""A folder for each notebook, of its name: exercises.py, figures.py, and what only it needs.

Notebooks call `check(my_function)`, in the learner's process or on every rank of a `%%ranks` cell:
it prints whether an answer is right, or what is wrong with it. The right ones are in
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
# In a verdict of the ranks of a cell: where a comparison differs.
_OF_ALL_RANKS = re.compile(r"on \d+ ranks, rank \d+: ")
_LESSONS = Path(__file__).parent


def exercises() -> dict[str, Exercise | JudgedExercise]:
    """Map names to exercises, of the whole course."""
    by_name: dict[str, Exercise | JudgedExercise] = {}
    for path in sorted(_LESSONS.glob("*/exercises.py")):
        by_name |= _exercises_of(path)
    return by_name


def exercise_called(name: str) -> Exercise | JudgedExercise | None:
    """Return the exercise of this name, None if there is none.

    Imports no other lesson than those whose exercises mention the name.
    """
    for path in sorted(_LESSONS.glob("*/exercises.py")):
        if name in path.read_text() and name in (known := _exercises_of(path)):
            return known[name]
    return None


def _exercises_of(path: Path) -> dict[str, Exercise | JudgedExercise]:
    """Map names to exercises, of one lesson."""
    module = import_module(f"{__name__}.{path.parent.name}.exercises")
    return {exercise.name: exercise for exercise in module.EXERCISES}


def check(answer: Callable) -> None:
    """Print the verdict on a learner's function, which has the name of its exercise.

    Raises PlainError if it is no function, as its result is none, or no exercise has this name.
    """
    name = getattr(answer, "__name__", "")
    if not (callable(answer) and name):
        cure = "give the function itself, as in lessons.check(batch_plan)"
        raise PlainError(f"{short(answer)} is no function: {cure}")
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
    """Whether this is a rank of a `%%ranks` cell other than 0, and rank 0 prints this verdict, too.

    Ranks judge in step: what one of them got is known to all. An error is told by whom it stops.
    """
    distributed = sys.modules.get("torch.distributed")
    if not (distributed and distributed.is_initialized() and distributed.get_rank()):
        return False
    return verdict in (RIGHT, NOT_ATTEMPTED) or bool(_OF_ALL_RANKS.search(verdict))
