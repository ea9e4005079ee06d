"""Exercises of notebook 17: a small one, and three projects, whose answers run for real.

`lessons.check` reads EXERCISES, in the driver process. The projects' checkers, which have their
names, start the ranks that they need on this machine; the first one also uses a Slurm.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ddp_helpers.lessons.do_it_yourself.mending import mend
from ddp_helpers.lessons.do_it_yourself.own_net import my_run
from ddp_helpers.lessons.exercise import Answer, Exercise, JudgedExercise
from ddp_helpers.lessons.run_script import LearnerRun, weight_distance

# ---- how a test set was counted


def how_tested(images: int, ranks: int, counted: int) -> str:
    """Classify an evaluation by the number of test images that all ranks counted together."""
    if counted <= images:
        return "each once" if counted == images else "not all"
    return "each by every rank" if counted == images * ranks else "padded"


_TESTED_CASES = [
    (10, 4, 10),
    (10, 4, 12),
    (10, 4, 40),
    (10, 4, 8),
    (8, 4, 8),
    (513, 2, 514),
    (512, 2, 1024),
    (513, 4, 512),
]
_TESTED_TRAPS = {
    "More than there are can have two reasons: "
    "padded shards, or ranks that each test everything.": (
        lambda images, ranks, counted: how_tested(images, 0, counted)
    ),
    "Padding repeats images and loses none: fewer than there are has a different name.": (
        lambda images, ranks, counted: {
            images: "each once",
            images * ranks: "each by every rank",
        }.get(counted, "padded")
    ),
}


# ---- a script that survives a kill

_RANKS, _EPOCHS = 2, 40
_KILL_AFTER = 5  # epochs


def _run_epochs(script: Path, folder: Path, kill_after: int | None = None) -> list[str]:
    """Run the script in a folder, and return its lines on epochs.

    kill_after: the epoch after whose line all its processes get SIGKILL; None to run to the end.
    Raises RuntimeError if the script fails by itself.
    """
    run = LearnerRun(
        script, f"--epochs={_EPOCHS}", "--save=spirals.pt", ranks=_RANKS, folder=folder
    )
    try:
        while True:
            ended = run.is_over()  # before the lines are read, so that none is missed
            lines = _epoch_lines(run)
            if any(line.startswith(f"epoch {kill_after}:") for line in lines):
                return lines
            if ended and run.complaint():
                raise RuntimeError(run.complaint())
            if ended:
                return lines
            time.sleep(0.02)
    finally:
        run.end()


def _epoch_lines(run: LearnerRun) -> list[str]:
    """List what the ranks have printed on epochs so far, rank by rank."""
    lines = [line for rank in range(_RANKS) for line in run.lines_of_rank(rank)]
    return [line for line in lines if line.startswith("epoch ")]


def my_resumable_script(path_of_script: Answer) -> list[str]:
    """List what a kill in the middle breaks, one line each. Prints what was seen."""
    script = Path(path_of_script()).resolve()  # type: ignore[arg-type]  # whatever a learner returns
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    with TemporaryDirectory() as killed, TemporaryDirectory() as unbroken:
        try:
            before = _run_epochs(script, Path(killed), kill_after=_KILL_AFTER)
            after = _run_epochs(script, Path(killed), kill_after=1)
            first = after[0] if after else "no line"
            print(f"found: killed after '{before[-1]}', started again: '{first}'")
            if first.startswith("epoch 1:"):
                cure = "save where it is each epoch, and load that at the start"
                return [f"after the kill it started with epoch 1: {cure}"]
            _run_epochs(script, Path(unbroken))
            saved = [Path(folder, "spirals.pt") for folder in (unbroken, killed)]
            distance = weight_distance(*(torch.load(path, weights_only=True) for path in saved))
        except (RuntimeError, OSError) as error:
            return [str(error)]
    if distance:
        difference = f"the weights differ by {distance:.0e} from a run that was not killed"
        return [f"{difference}: what else has a state? which epoch is next?"]
    print("found: the weights are those of a run that was not killed, to the bit")
    return []


EXERCISES = [
    Exercise(how_tested, _TESTED_CASES, _TESTED_TRAPS),
    JudgedExercise("my_run", my_run),
    JudgedExercise("mend", mend),
    JudgedExercise("my_resumable_script", my_resumable_script),
]
