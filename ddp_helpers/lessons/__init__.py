"""A folder for each notebook, of its name: exercises.py, figures.py, and what only it needs.

Notebooks call `check(my_function)`, in the learner's process or on every rank of a `%%ranks` cell:
it prints whether an answer is right, or what is wrong with it. The right ones are in
`notebooks/solutions`.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ddp_helpers.lessons.exercise import Exercise

_LESSONS = Path(__file__).parent


def exercises(name: str = "") -> dict[str, Exercise]:
    """Map the names of oracles to their exercises, of the whole course or of some lessons.

    name: where given, import only lessons that define a function of this name, which is faster.
    """
    by_name: dict[str, Exercise] = {}
    for path in sorted(_LESSONS.glob("*/exercises.py")):
        text = path.read_text()
        if "\nEXERCISES = " in text and f"\ndef {name}" in text:
            module = import_module(f"{__name__}.{path.parent.name}.exercises")
            by_name |= {exercise.oracle.__name__: exercise for exercise in module.EXERCISES}
    return by_name


def check(answer: Callable) -> None:
    """Print the verdict on a learner's function, which has the name of its exercise.

    Raises ValueError if no exercise has this name.
    """
    name = answer.__name__
    exercise = exercises(name).get(name)
    if exercise is None:
        raise ValueError(f"no exercise is called {name}: keep the name that the stub has")
    print(exercise.verdict(answer))
