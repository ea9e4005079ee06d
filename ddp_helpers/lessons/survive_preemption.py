"""Exercises of notebook 11."""

import hashlib
import math

from ddp_helpers.lessons.exercise import Exercise


def lost_steps(killed_in: int, every: int, steps_per_epoch: int) -> int:
    """Steps begun after the last checkpoint: one each `every` steps, and one after each epoch."""
    done = killed_in - 1
    return killed_in - max(done // every * every, done // steps_per_epoch * steps_per_epoch)


def newest_whole(files: dict[str, bytes]) -> str | None:
    """The newest checkpoint whose content has the SHA-256 with which its name ends; None if there is none."""
    return next((name for name in sorted(files, reverse=True) if trusted(name, files[name])), None)


def trusted(name: str, content: bytes) -> bool:
    """Whether a file is called a checkpoint, and holds what its name says."""
    stem, _, kind = name.rpartition(".")
    return kind == "pt" and stem.rpartition("-")[2] == hashlib.sha256(content).hexdigest()[:16]


def attempts_needed(work: float, limit: float, start: float, grace: float) -> int:
    """The number of attempts, if the warning always comes in time and nothing else goes wrong."""
    return math.ceil(work / (limit - start - grace))


def steps_between_saves(cost: float, between: float, step: float) -> int:
    """The best value of --checkpoint-every; at least 1. All arguments are in seconds."""
    return max(1, round(math.sqrt(2 * cost * between) / step))


def called(step: int, content: bytes) -> str:
    """The name under which the course keeps this content."""
    return f"step-{step:08}-{hashlib.sha256(content).hexdigest()[:16]}.pt"


WHOLE = {called(12, b"twelve"): b"twelve", called(9, b"nine"): b"nine"}
FLIPPED = {**WHOLE, called(15, b"fifteen"): b"fiftein"}
SAVING = {"saving.part": b"eigh", **FLIPPED}
NOTHING = {called(3, b"three"): b"thr", "saving.part": b""}

EXERCISES = [
    Exercise(
        lost_steps,
        [(14, 5, 20), (20, 5, 20), (23, 5, 22), (1, 5, 20), (33, 100, 20)],
        {
            "There is a checkpoint after each epoch, too.": lambda killed_in, every, steps_per_epoch: (
                killed_in - (killed_in - 1) // every * every
            ),
            "The step in which it dies is not done, so it cannot have been saved; it counts as lost.": (
                lambda killed_in, every, steps_per_epoch: (
                    killed_in - max(killed_in // every * every, killed_in // steps_per_epoch * steps_per_epoch)
                )
            ),
            "The step in which it dies has to be done again, too.": lambda killed_in, every, steps_per_epoch: (
                lost_steps(killed_in, every, steps_per_epoch) - 1
            ),
        },
    ),
    Exercise(
        newest_whole,
        [(WHOLE,), (FLIPPED,), (SAVING,), (NOTHING,)],
        {
            "The newest by name may be damaged: compare the digest of its content.": lambda files: max(
                [name for name in files if name.endswith(".pt")], default=None
            ),
            "That is whole, and not the newest: the step stands in the name.": lambda files: min(
                [name for name in files if trusted(name, files[name])], default=None
            ),
            "If no file is whole, give None: a damaged checkpoint is worse than none.": lambda files: (
                newest_whole(files) or max(files)
            ),
        },
    ),
    Exercise(
        attempts_needed,
        [(24, 4, 0.25, 0.25), (3, 4, 0.25, 0.25), (3.75, 4, 0.25, 0.25), (7, 4, 0.25, 0.25), (24, 2, 0.5, 0.25)],
        {
            "Each attempt starts anew, and stops at its warning: both times are lost to the work.": (
                lambda work, limit, start, grace: math.ceil(work / limit)
            ),
            "A part of an attempt is an attempt: round up.": lambda work, limit, start, grace: round(
                work / (limit - start - grace)
            ),
            "If the work fits exactly, no further attempt is needed: round up, instead of adding one.": (
                lambda work, limit, start, grace: int(work / (limit - start - grace)) + 1
            ),
        },
    ),
    Exercise(
        steps_between_saves,
        [(2.0, 86_400.0, 0.5), (30.0, 3600.0, 1.5), (0.1, 3600.0, 60.0)],
        {
            "That is the interval in seconds; divide it by the seconds of a step.": lambda cost, between, step: round(
                math.sqrt(2 * cost * between)
            ),
            "The formula has a 2 under the root: half an interval is lost on average.": lambda cost, between, step: max(
                1, round(math.sqrt(cost * between) / step)
            ),
            "No less than one step: nothing can be saved in the middle of one.": lambda cost, between, step: round(
                math.sqrt(2 * cost * between) / step
            ),
        },
    ),
]
