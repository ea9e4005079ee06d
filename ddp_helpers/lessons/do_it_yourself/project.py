"""A project: an exercise whose answer is run for real, and judged by what came of it."""

from collections.abc import Callable
from dataclasses import dataclass

from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, Exercise

SEPARATOR = "\n         "  # the next line stands below the first


@dataclass(frozen=True)
class Project(Exercise):
    """An exercise without an oracle to compare with: `judge` runs the answer, and gives a line for what is missing."""

    judge: Callable[[Callable], list[str]]

    def verdict(self, answer: Callable) -> str:
        """What is to be said of a learner's function: right, not attempted, or all that is missing, a line each."""
        try:
            lines = self.judge(answer)
        except NotImplementedError:
            return NOT_ATTEMPTED
        except (Exception, SystemExit) as error:
            return f"not yet: {self.oracle.__name__} ends with {type(error).__name__}: {error}"
        return f"not yet: {SEPARATOR.join(lines)}" if lines else RIGHT
