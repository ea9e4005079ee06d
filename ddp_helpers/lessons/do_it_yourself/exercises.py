"""Exercises of notebook 14: a small one, and three projects, whose answers are run for real."""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_helpers import ROOT
from ddp_helpers.lessons.do_it_yourself import mending, own_net
from ddp_helpers.lessons.do_it_yourself.mending import FAULTS
from ddp_helpers.lessons.exercise import Exercise, Project
from ddp_helpers.lessons.run_script import Run, far

RANKS, EPOCHS, KILL_AFTER = 2, 40, 5


def how_tested(images: int, ranks: int, counted: int) -> str:
    """Classify an evaluation by the number of test images that all ranks counted together."""
    if counted <= images:
        return "each once" if counted == images else "not all"
    return "each by every rank" if counted == images * ranks else "padded"


def my_run(folder: Path) -> None:
    """Train a net of one's own in this folder, as a job. Only a notebook can: the net is from a cell of it."""
    raise NotImplementedError


def mend(text: str) -> str:
    """The script without its faults."""
    for fault in FAULTS:
        text = text.replace(fault.wrong, fault.right)
    return text


def my_resumable_script() -> Path:
    """The path of spirals_ddp.py, made to survive a kill."""
    return ROOT / "notebooks" / "solutions" / "spirals_resumable.py"


def epochs_of(script: Path, folder: Path, kill_after: int = EPOCHS + 1) -> list[str]:
    """Run the script to its end, or until it has told of an epoch: then all its processes get SIGKILL.

    Returns the lines of its epochs. Raises RuntimeError if it fails by itself.
    """
    run = Run(script, f"--epochs={EPOCHS}", "--save=spirals.pt", ranks=RANKS, folder=folder)
    try:
        while True:
            over = run.over()
            lines = [line for rank in range(RANKS) for line in run.said(rank) if line.startswith("epoch ")]
            if any(line.startswith(f"epoch {kill_after}:") for line in lines):
                return lines
            if over and run.complaint():
                raise RuntimeError(run.complaint())
            if over:
                return lines
            time.sleep(0.02)
    finally:
        run.end()


def survives(answer: Callable[[], Path]) -> list[str]:
    """A line for each thing that a kill in the middle spoils. Prints what is found."""
    import torch  # here: other exercises do without

    script = Path(answer()).resolve()
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    with TemporaryDirectory() as killed, TemporaryDirectory() as whole:
        try:
            before = epochs_of(script, Path(killed), KILL_AFTER)
            after = epochs_of(script, Path(killed), kill_after=1)
            print(f"found: killed after '{before[-1]}', started again: '{next(iter(after), 'no line')}'")
            if after[:1] and after[0].startswith("epoch 1:"):
                return ["after the kill it began with epoch 1: save where it is each epoch, and load that at the start"]
            epochs_of(script, Path(whole))
            weights = [torch.load(Path(folder, "spirals.pt"), weights_only=True) for folder in (whole, killed)]
        except (RuntimeError, OSError) as error:
            return [str(error)]
    if off := far(*weights):
        why = "what else has a state? which epoch next?"
        return [f"the weights differ by {off:.0e} from a run that was not killed: {why}"]
    print("found: the weights are those of a run that was not killed, to the bit")
    return []


EXERCISES = [
    Exercise(
        how_tested,
        [(10, 4, 10), (10, 4, 12), (10, 4, 40), (10, 4, 8), (8, 4, 8), (513, 2, 514), (512, 2, 1024), (513, 4, 512)],
        {
            "More than there are can have two reasons: padded shards, or ranks that each test everything.": (
                lambda images, ranks, counted: (
                    "each once" if counted == images else "padded" if counted > images else "not all"
                )
            ),
            "Padding repeats images and loses none: fewer than there are has another name.": (
                lambda images, ranks, counted: {images: "each once", images * ranks: "each by every rank"}.get(
                    counted, "padded"
                )
            ),
        },
    ),
    Project(my_run, [], {}, own_net.judge),
    Project(mend, [], {}, mending.judge),
    Project(my_resumable_script, [], {}, survives),
]
