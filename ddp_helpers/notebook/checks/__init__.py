"""The checkers of the exercises: `check(my_function)` says whether it is right, or what is wrong with it.

Each notebook's exercises are in the module of its name. The answers are in `notebooks/solutions`.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ddp_helpers.notebook.checks.exercise import Exercise

NOT_TOPICS = ("__init__", "exercise")


def exercises() -> dict[str, Exercise]:
    """Every exercise of the course, by the name of the function that the learner writes."""
    topics = [path.stem for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem not in NOT_TOPICS]
    lists = [import_module(f"{__name__}.{topic}").EXERCISES for topic in topics]
    return {exercise.oracle.__name__: exercise for one in lists for exercise in one}


def check(answer: Callable) -> None:
    """Print what is to be said of an answer; the learner's process calls it, with the function of the exercise."""
    known = exercises()
    if answer.__name__ not in known:
        raise ValueError(f"no exercise is called {answer.__name__}: keep the name that the stub has")
    print(known[answer.__name__].verdict(answer))
